// The last pictures of panels in a notebook, where no live panel stands above them, as after a page was reloaded while a cell ran.
// Guarantees: each such picture has its time. While a cluster runs it has a button, too, which puts a live panel in its place.

import type { NotebookPanel } from '@jupyterlab/notebook';
import { Widget } from '@lumino/widgets';

import { Part } from './part';
import type { KernelSession } from './session';
import { clockTime, current, STRINGS } from './strings';

const STILL = '.rb-still[data-at]';
const OUTPUT = '.jp-OutputArea-child';
// Panels that need only their name.
const FOLLOWING = new Set([
  'workers', 'progress', 'metrics', 'resources', 'traffic', 'logs', 'rrefs', 'autograd', 'pipeline', 'messages'
]);

/** Mark the pictures of a notebook whenever its session, or one of its outputs, changes. */
export function markStills(panel: NotebookPanel, session: KernelSession): void {
  const { node } = panel.content;
  let request = 0;
  const mark = (): void => {
    request = 0;
    node.querySelectorAll<HTMLElement>(STILL).forEach(still => markStill(still, panel, session));
  };
  const schedule = (): void => {
    request ||= requestAnimationFrame(mark);
  };
  const observer = new MutationObserver(schedule);
  observer.observe(node, { childList: true, subtree: true });
  session.changed.connect(schedule);
  panel.disposed.connect(() => {
    observer.disconnect();
    cancelAnimationFrame(request);
  });
  schedule();
}

function markStill(still: HTMLElement, panel: NotebookPanel, session: KernelSession): void {
  const line = still.querySelector<HTMLElement>('.rbx-still') ?? makeLine(still, panel, session);
  const isRunning = clusterOf(still, session) !== undefined && FOLLOWING.has(still.dataset['panel'] ?? '');
  line.querySelector('button')?.toggleAttribute('hidden', !isRunning);
}

/** Return the name of the picture's cluster if that runs: of the current one if the picture names none. */
function clusterOf(still: HTMLElement, session: KernelSession): string | undefined {
  const name = still.dataset['cluster'];
  return name ? session.state?.clusters.find(one => one.name === name)?.name : current(session.state)?.name;
}

function makeLine(still: HTMLElement, panel: NotebookPanel, session: KernelSession): HTMLElement {
  const button = document.createElement('button');
  button.className = 'rbx-button';
  button.textContent = STRINGS.panels.showLive;
  button.addEventListener('click', () => showLive(still, panel, session));
  const line = document.createElement('p');
  line.className = 'rbx-still';
  line.append(`${STRINGS.panels.picture(clockTime(Number(still.dataset['at'])))} `, button);
  still.prepend(line);
  return line;
}

/** Put a live panel in the output above a picture, where the former one was: by its styles it hides the picture. */
function showLive(still: HTMLElement, panel: NotebookPanel, session: KernelSession): void {
  const above = still.closest(OUTPUT)?.previousElementSibling;
  const cluster = clusterOf(still, session);
  if (!above || cluster === undefined) {
    return;
  }
  [...above.children].forEach(child => child.toggleAttribute('hidden', true)); // an error, or a widget without a model
  const part = new Part(still.dataset['panel'] ?? '');
  Widget.attach(part, above as HTMLElement);
  const observer = new MutationObserver(() => {
    if (!part.node.isConnected) {
      observer.disconnect();
      part.dispose();
    }
  });
  observer.observe(panel.content.node, { childList: true, subtree: true });
  panel.disposed.connect(() => part.dispose());
  part.ask(session, panel, cluster);
}
