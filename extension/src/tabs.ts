// Opens a live panel as a tab: beside the notebook in JupyterLab, and below it in Jupyter Notebook, which has one main tab.
// The kernel creates the widget and sends its MIME bundle. The notebook's own renderers draw it, as only they know the
// widgets of that kernel.
// Guarantees: the tab closes with its notebook and with the kernel, and the kernel closes the panel when the tab closes.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import type { IMimeBundle } from '@jupyterlab/nbformat';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { OutputAreaModel, SimplifiedOutputArea } from '@jupyterlab/outputarea';
import { UUID } from '@lumino/coreutils';

import { KernelComm } from './comm';
import { rpcbenchIcon } from './icons';
import type { KernelSession } from './session';

/** Ask the kernel for the panel `name`, and show it in a tab. */
export async function openPanel(
  app: JupyterFrontEnd, notebook: NotebookPanel, session: KernelSession, name: string
): Promise<void> {
  if (!session.kernel) {
    return;
  }
  let tab: MainAreaWidget | null = null;
  const comm = new KernelComm(session.kernel, {
    onMessage: data => {
      tab ??= addTab(app, notebook, name, data['bundle'] as IMimeBundle, () => comm.close());
    },
    onEnd: data => {
      tab?.dispose();
      if (typeof data['error'] === 'string') {
        session.notify(data['error'], true);
      }
    }
  });
  notebook.disposed.connect(() => tab?.dispose());
  await comm.open({ do: 'panel', name });
}

function addTab(
  app: JupyterFrontEnd, notebook: NotebookPanel, name: string, bundle: IMimeBundle, onClosed: () => void
): MainAreaWidget {
  const model = new OutputAreaModel({ trusted: true });
  const content = new SimplifiedOutputArea({ model, rendermime: notebook.content.rendermime });
  const tab = new MainAreaWidget({ content });
  tab.id = `rpcbench-panel-${UUID.uuid4()}`;
  tab.addClass('rb-tab');
  tab.toolbar.hide();
  tab.title.label = `${name}: ${notebook.title.label}`;
  tab.title.caption = `The panel ${name} of ${notebook.context.path}`;
  tab.title.icon = rpcbenchIcon;
  tab.title.closable = true;
  tab.disposed.connect(onClosed);
  model.add({ output_type: 'display_data', data: bundle, metadata: {} });
  if (app.name === 'JupyterLab') {
    app.shell.add(tab, 'main', { mode: 'split-right', ref: notebook.id });
  } else {
    app.shell.add(tab, 'down');
    app.shell.activateById(tab.id);
  }
  return tab;
}
