// The plugin: it creates the sidebar, the commands, the pages, the target pickers and the status item, and adds them to
// JupyterLab.
// Guarantees: magics can do everything that the extension does. It works without the optional services, such as the status
// bar, which Jupyter Notebook does not have.

import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import type { Cell } from '@jupyterlab/cells';
import { ILauncher } from '@jupyterlab/launcher';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';

import { Actions } from './actions';
import { addCommands } from './commands';
import { acceptWorkers } from './drag';
import { addPages } from './pages';
import { TargetPicker } from './picker';
import { RememberedPanels } from './remembered';
import { rerunCells } from './rerunCell';
import { revealCells } from './revealCell';
import { KernelSessions } from './sessions';
import { Sidebar } from './sidebar';
import { StatusItem } from './status';
import { markStills } from './stills';
import { PanelTabs } from './tabs';

import '../style/index.css';

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-rpcbench:plugin',
  description: 'Workers in a sidebar, a target for each cell, panels as tabs, a start page.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette, IToolbarWidgetRegistry, IStatusBar, ILayoutRestorer, ILabShell, ILauncher, ISettingRegistry],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    palette: ICommandPalette | null,
    toolbars: IToolbarWidgetRegistry | null,
    statusBar: IStatusBar | null,
    restorer: ILayoutRestorer | null,
    lab: ILabShell | null,
    launcher: ILauncher | null,
    registry: ISettingRegistry | null
  ) => {
    const sessions = new KernelSessions(tracker);
    const tabs = new PanelTabs(app, sessions, lab && restorer);
    const actions = new Actions(sessions, tabs);
    const sidebar = new Sidebar(sessions, actions);
    app.shell.add(sidebar, lab ? 'left' : 'right', { rank: 600 });
    restorer?.add(sidebar, sidebar.id);
    addCommands(app, sessions, actions, palette);
    if (lab && registry) {
      new RememberedPanels(app, lab, registry, sessions, tabs);
    }
    if (lab) {
      addPages(app, palette, launcher, restorer);
    }
    toolbars?.addFactory<Cell>('Cell', 'rpcbench-target', cell => new TargetPicker(cell, sessions));
    tracker.widgetAdded.connect((_, panel) => acceptWorkers(panel));
    tracker.forEach(acceptWorkers);
    tracker.widgetAdded.connect((_, panel) => markStills(panel, sessions.forPanel(panel)));
    tracker.forEach(panel => markStills(panel, sessions.forPanel(panel)));
    const ownerOf = (node: Node) => tracker.find(panel => panel.node.contains(node)) ?? tabs.ownerOf(node);
    revealCells(tracker, ownerOf, id => app.shell.activateById(id));
    rerunCells(tracker, ownerOf);
    if (statusBar) {
      const item = new StatusItem(sessions, () => app.shell.activateById(sidebar.id));
      const place = { align: 'left', rank: 5, isActive: () => item.isShown, activeStateChanged: sessions.changed } as const;
      statusBar.registerStatusItem('rpcbench:workers', { item, ...place });
    }
  }
};

export default plugin;
