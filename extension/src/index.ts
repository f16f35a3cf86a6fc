// rpcbench in JupyterLab: joins the parts. All that they do can be done by magics as well.

import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import type { Cell } from '@jupyterlab/cells';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IStatusBar } from '@jupyterlab/statusbar';

import { Benches } from './benches';
import { addCommands } from './commands';
import { Deeds } from './deeds';
import { acceptWorkers } from './drag';
import { TargetPicker } from './picker';
import { revealCells } from './reveal';
import { Sidebar } from './sidebar';
import { StatusItem } from './status';

import '../style/index.css';

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'rpcbench:plugin',
  description: 'Workers in a sidebar, a target for each cell, panels as tabs.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette, IToolbarWidgetRegistry, IStatusBar, ILayoutRestorer, ILabShell],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    palette: ICommandPalette | null,
    toolbars: IToolbarWidgetRegistry | null,
    statusBar: IStatusBar | null,
    restorer: ILayoutRestorer | null,
    lab: ILabShell | null
  ) => {
    const benches = new Benches(tracker);
    const deeds = new Deeds(app, benches);
    const sidebar = new Sidebar(benches, deeds);
    app.shell.add(sidebar, lab ? 'left' : 'right', { rank: 600 });
    restorer?.add(sidebar, sidebar.id);
    addCommands(app, benches, deeds, palette);
    toolbars?.addFactory<Cell>('Cell', 'rpcbench-target', cell => new TargetPicker(cell, benches));
    tracker.widgetAdded.connect((_, panel) => acceptWorkers(panel));
    tracker.forEach(acceptWorkers);
    revealCells(tracker, id => app.shell.activateById(id));
    if (statusBar) {
      const item = new StatusItem(benches, () => app.shell.activateById(sidebar.id));
      const isActive = () => item.isShown;
      statusBar.registerStatusItem('rpcbench:workers', { item, align: 'left', rank: 5, isActive, activeStateChanged: benches.changed });
    }
  }
};

export default plugin;
