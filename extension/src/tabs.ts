// A live panel as a tab, beside the notebook in JupyterLab and below it in Notebook, which has one main tab only. The kernel makes the widget and says how to draw it; the notebook's own
// renderers draw it, as they know its kernel's widgets. The tab goes with the notebook and the kernel, and the kernel
// closes the panel when the tab goes.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import type { IMimeBundle } from '@jupyterlab/nbformat';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { OutputAreaModel, SimplifiedOutputArea } from '@jupyterlab/outputarea';
import { UUID } from '@lumino/coreutils';

import type { Bench } from './bench';
import { benchIcon } from './icons';
import { Line } from './talk';

export async function openPanel(
  app: JupyterFrontEnd, notebook: NotebookPanel, bench: Bench, name: string
): Promise<void> {
  if (!bench.kernel) {
    return;
  }
  let tab: MainAreaWidget | null = null;
  const line = new Line(bench.kernel, {
    onMessage: data => {
      tab ??= shown(app, notebook, name, data['bundle'] as IMimeBundle, () => line.close());
    },
    onEnd: data => {
      tab?.dispose();
      if (typeof data['error'] === 'string') {
        bench.say(data['error'], true);
      }
    }
  });
  notebook.disposed.connect(() => tab?.dispose());
  await line.open({ do: 'panel', name });
}

function shown(
  app: JupyterFrontEnd, notebook: NotebookPanel, name: string, bundle: IMimeBundle, closed: () => void
): MainAreaWidget {
  const model = new OutputAreaModel({ trusted: true });
  const content = new SimplifiedOutputArea({ model, rendermime: notebook.content.rendermime });
  const tab = new MainAreaWidget({ content });
  tab.id = `rpcbench-panel-${UUID.uuid4()}`;
  tab.addClass('rb-tab');
  tab.toolbar.hide();
  tab.title.label = `${name}: ${notebook.title.label}`;
  tab.title.caption = `The panel ${name} of ${notebook.context.path}`;
  tab.title.icon = benchIcon;
  tab.title.closable = true;
  tab.disposed.connect(closed);
  model.add({ output_type: 'display_data', data: bundle, metadata: {} });
  if (app.name === 'JupyterLab') {
    app.shell.add(tab, 'main', { mode: 'split-right', ref: notebook.id });
  } else {
    app.shell.add(tab, 'down');
    app.shell.activateById(tab.id);
  }
  return tab;
}
