// Scrolls to the cell that created an RRef, after a click in the RRefs panel of any notebook or tab.
// Guarantees: the cell is found by its id, also if it has run again since, has no number yet, or is not rendered because it
// is far away.

import type { INotebookTracker } from '@jupyterlab/notebook';

/** The event that panels send, with the cell's id in `detail`. A listener that finds the cell calls `preventDefault()`. */
export const REVEAL_CELL_EVENT = 'rpcbench:reveal';

/** Listen for the event on the whole page. `activate` shows the widget with an id. */
export function revealCells(tracker: INotebookTracker, activate: (id: string) => void): void {
  document.addEventListener(REVEAL_CELL_EVENT, event => {
    const id = (event as CustomEvent<{ cell?: string }>).detail?.cell;
    const matches = (one: { model: { id: string } }) => one.model.id === id;
    const panel = tracker.find(one => one.content.widgets.some(matches));
    if (!panel) {
      return;
    }
    event.preventDefault();
    const { content } = panel;
    const index = content.widgets.findIndex(matches);
    activate(panel.id);
    content.activeCellIndex = index;
    content.deselectAll();
    void content.scrollToItem(index, 'center').then(() => {
      const colours = [{ backgroundColor: 'rgb(230 159 0 / 35%)' }, {}];
      content.widgets[index]?.node.animate(colours, 1500);
    });
  });
}
