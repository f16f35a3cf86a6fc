// A click on an RRef's cell, in a panel of any notebook or tab, scrolls to that cell: by its id, so also where it has run
// again since, has no number yet, or is so far away that JupyterLab has not drawn it.

import type { INotebookTracker } from '@jupyterlab/notebook';

/** The event that panels send, with the cell's id in `detail`; who finds the cell says so by `preventDefault()`. */
export const EVENT = 'rpcbench:reveal';

/** Listen for it on the whole page. */
export function revealCells(tracker: INotebookTracker, activate: (id: string) => void): void {
  document.addEventListener(EVENT, event => {
    const id = (event as CustomEvent<{ cell?: string }>).detail?.cell;
    const has = (one: { model: { id: string } }) => one.model.id === id;
    const panel = tracker.find(one => one.content.widgets.some(has));
    if (!panel) {
      return;
    }
    event.preventDefault();
    const { content } = panel;
    const index = content.widgets.findIndex(has);
    activate(panel.id);
    content.activeCellIndex = index;
    content.deselectAll();
    void content.scrollToItem(index, 'center').then(() => {
      const colours = [{ backgroundColor: 'rgb(230 159 0 / 35%)' }, {}];
      content.widgets[index]?.node.animate(colours, 1500);
    });
  });
}
