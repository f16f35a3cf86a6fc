// The start page, and new notebooks whose first cell starts workers: as commands and as cards of the launcher. `rpcbench lab`
// sets an option of the page that opens the start page when a browser's tab first shows JupyterLab.
// Guarantees: the start page is open at most once. After a reload it is there again, unless the user has closed it.

import type { ILayoutRestorer, JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget, WidgetTracker, type ICommandPalette } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import type { ILauncher } from '@jupyterlab/launcher';
import type { INotebookContent } from '@jupyterlab/nbformat';
import type { ServiceManager } from '@jupyterlab/services';
import { UUID } from '@lumino/coreutils';

import { rpcbenchIcon } from './icons';
import { StartPage } from './startPage';
import { FIRST_CELLS, STRINGS } from './strings';

const START_PAGE = 'rpcbench:start-page';
const NEW_NOTEBOOK = 'rpcbench:new-notebook';
const OPTION = 'rpcbenchStart'; // as in `rpcbench/cli/main.py`
const CATEGORY = STRINGS.product;

export function addPages(
  app: JupyterFrontEnd, palette: ICommandPalette | null, launcher: ILauncher | null, restorer: ILayoutRestorer | null
): void {
  const tracker = new WidgetTracker<MainAreaWidget<StartPage>>({ namespace: 'rpcbench-start' });
  const { commands, serviceManager } = app;
  const open = (path: string) => void commands.execute('docmanager:open', { path, factory: 'Notebook' });
  const add = async ({ cwd = '' }: { cwd?: string }) => open(await newNotebook(serviceManager, cwd));
  commands.addCommand(START_PAGE, {
    label: STRINGS.commands.startPage,
    caption: STRINGS.startPage.caption,
    icon: rpcbenchIcon,
    execute: () => {
      let page = tracker.currentWidget ?? tracker.find(() => true);
      if (!page) {
        page = new MainAreaWidget({ content: new StartPage(serviceManager.contents, open, () => void add({})) });
        page.id = 'rpcbench-start-page-tab';
        page.toolbar.hide();
        void tracker.add(page);
        app.shell.add(page, 'main', { mode: 'tab-after' });
      }
      app.shell.activateById(page.id);
    }
  });
  commands.addCommand(NEW_NOTEBOOK, {
    label: args => (args['isLauncher'] ? STRINGS.startPage.newTitle : STRINGS.commands.notebook),
    caption: STRINGS.startPage.newCaption,
    icon: rpcbenchIcon,
    execute: add
  });
  [NEW_NOTEBOOK, START_PAGE].forEach((command, rank) => {
    palette?.addItem({ command, category: CATEGORY });
    launcher?.add({ command, category: CATEGORY, rank, args: { isLauncher: true } });
  });
  void restorer?.restore(tracker, { command: START_PAGE, name: () => 'page' });
  openAtStart(app);
}

/** Open the start page if `rpcbench lab` asks for it, in a new tab of the browser: a reload restores what was open. */
function openAtStart(app: JupyterFrontEnd): void {
  if (PageConfig.getOption(OPTION) && !window.sessionStorage.getItem(OPTION)) {
    window.sessionStorage.setItem(OPTION, 'done');
    void app.restored.then(() => app.commands.execute(START_PAGE));
  }
}

/** Make a notebook whose first cell starts workers, and return its path. */
async function newNotebook({ contents, kernelspecs }: ServiceManager.IManager, folder: string): Promise<string> {
  const { path } = await contents.newUntitled({ path: folder, type: 'notebook' });
  await kernelspecs.ready;
  const specs = kernelspecs.specs;
  const isPython = (name: string) => specs?.kernelspecs[name]?.language === 'python';
  const name = [specs?.default ?? '', ...Object.keys(specs?.kernelspecs ?? {})].find(isPython);
  const content: INotebookContent = {
    metadata: name ? { kernelspec: { name, display_name: specs?.kernelspecs[name]?.display_name ?? name } } : {},
    nbformat: 4,
    nbformat_minor: 5,
    cells: FIRST_CELLS.map(source => ({
      id: UUID.uuid4(), cell_type: 'code', source, metadata: {}, outputs: [], execution_count: null
    }))
  };
  await contents.save(path, { type: 'notebook', format: 'json', content });
  return path;
}
