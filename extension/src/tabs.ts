// Opens panels as tabs: the first one beside the notebook, each further one as a tab there. In Jupyter Notebook, which has one
// main tab, they open below it.
// Guarantees: a panel of a cluster is open once; opening it again shows it. JupyterLab restores the tabs after a reload, and
// `RememberedPanels` those of a notebook that is opened again.

import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { WidgetTracker } from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Widget } from '@lumino/widgets';

import { inFront, NOTEBOOK, planSteps, type Area } from './layouts';
import { PanelTab } from './panelTab';
import type { KernelSessions } from './sessions';
import { current, DASHBOARD } from './strings';

const RESTORE = 'rpcbench:restore-panel';
// A board needs half of this width to be readable. It opens below a notebook that is narrower.
const BOARD_PIXELS = 1000;

export class PanelTabs {
  constructor(app: JupyterFrontEnd, sessions: KernelSessions, restorer: ILayoutRestorer | null) {
    this._app = app;
    this._sessions = sessions;
    const execute = ({ name = DASHBOARD, path = '', cluster = '' }: { name?: string; path?: string; cluster?: string }) => {
      this._app.shell.add(this._make(name, path, cluster), 'main', { activate: false });
    };
    app.commands.addCommand(RESTORE, { execute });
    void restorer?.restore(this._tracker, {
      command: RESTORE,
      args: ({ name, path, cluster }) => ({ name, path, cluster }),
      name: ({ name, path, cluster }) => `${name}:${path}:${cluster}`
    });
    void app.restored.then(() => this._tracker.forEach(tab => (tab.isRestored = true)));
    sessions.anyChanged.connect(this._markAll, this);
  }

  /** Show the panel `name` of a notebook's current cluster, or its dashboard. */
  open(notebook: NotebookPanel, name: string): void {
    const { shell } = this._app;
    const cluster = current(this._sessions.forPanel(notebook).state)?.name ?? '';
    const isOfIt = (tab: PanelTab) => tab.cluster === cluster || cluster === '' || tab.cluster === '';
    const there = this._tracker.find(tab => tab.name === name && tab.notebook === notebook && isOfIt(tab));
    if (there) {
      return shell.activateById(there.id);
    }
    const others = this._others(notebook);
    const tab = this._make(name, notebook.context.path, cluster);
    tab.isRestored = true;
    if (this._app.name !== 'JupyterLab') {
      shell.add(tab, 'down');
      shell.activateById(tab.id);
    } else if (others.length) {
      shell.add(tab, 'main', { mode: 'tab-after', ref: others.at(-1)! });
    } else {
      const isNarrow = name === DASHBOARD && notebook.node.clientWidth < BOARD_PIXELS;
      shell.add(tab, 'main', { mode: isNarrow ? 'split-bottom' : 'split-right', ref: notebook.id });
    }
  }

  /** The tabs of a notebook. */
  of(notebook: NotebookPanel): PanelTab[] {
    return this._tracker.filter(tab => tab.path === notebook.context.path);
  }

  /** Return the notebook whose tab has this node; null for a node elsewhere. */
  ownerOf(node: Node): NotebookPanel | null {
    return this._tracker.find(tab => tab.node.contains(node))?.notebook ?? null;
  }

  /** Return the key of a panel of this notebook; null for any other widget. */
  keyOf(widget: Widget, notebook: NotebookPanel): string | null {
    return widget instanceof PanelTab && widget.notebook === notebook ? widget.key : null;
  }

  /** Open the panels of a layout where they were. If panels of other notebooks are there, they are tabs beside those. */
  bringBack(notebook: NotebookPanel, layout: Area<string>): void {
    const { shell } = this._app;
    const front = shell.currentWidget;
    const others = this._others(notebook);
    const ids = new Map([[NOTEBOOK, notebook.id]]);
    for (const { name, mode, beside } of planSteps(layout)) {
      const [panel = DASHBOARD, cluster = ''] = name.split('/', 2);
      const tab = this._make(panel, notebook.context.path, cluster);
      tab.isRestored = true;
      const ref = others.at(-1) ?? ids.get(beside) ?? notebook.id;
      shell.add(tab, 'main', { mode: others.length ? 'tab-after' : mode, ref, activate: false });
      ids.set(name, tab.id);
      if (others.length) {
        others.push(tab.id);
      }
    }
    if (!others.length) {
      inFront(layout).forEach(name => shell.activateById(ids.get(name) ?? notebook.id));
      shell.activateById(front?.id ?? notebook.id);
    }
  }

  /** The ids of the tabs in the main area that a new one joins: those of the notebook, or else of other ones. */
  private _others(notebook: NotebookPanel): string[] {
    const main = new Set(this._app.shell.widgets('main'));
    const tabs = this._tracker.filter(tab => main.has(tab));
    const own = tabs.filter(tab => tab.notebook === notebook);
    return (own.length ? own : tabs).map(tab => tab.id);
  }

  private _make(name: string, path: string, cluster: string): PanelTab {
    const open = (notebook: string) => void this._app.commands.execute('docmanager:open', { path: notebook });
    const tab = new PanelTab(name, path, cluster, this._sessions, open);
    void this._tracker.add(tab);
    let saved = [path, cluster].join();
    tab.title.changed.connect(() => {
      const now = [tab.path, tab.cluster].join();
      if (saved !== now) {
        saved = now;
        void this._tracker.save(tab);
      }
    });
    tab.disposed.connect(this._markAll, this);
    this._markAll();
    return tab;
  }

  private _markAll(): void {
    const tabs = this._tracker.filter(tab => !tab.isDisposed);
    const share = new Set([...this._sessions.withClusters.map(({ context }) => context.path), ...tabs.map(({ path }) => path)]);
    const front = this._sessions.notebook?.context.path;
    tabs.forEach(tab => tab.mark(front !== undefined && tab.path !== front, share.size > 1));
  }

  private readonly _app: JupyterFrontEnd;
  private readonly _sessions: KernelSessions;
  private readonly _tracker = new WidgetTracker<PanelTab>({ namespace: 'rpcbench-panels' });
}
