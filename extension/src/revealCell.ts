// Scrolls to the cell that created an RRef or began a job, after a click in a panel of any notebook or tab.
// Guarantees: the cell is found by its id, also if it has run again since, has no number yet, or is not rendered because it
// is far away; first in the panel's own notebook, as copies of notebooks have the same ids.

import type { Cell } from '@jupyterlab/cells';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

/** The event that panels send, with the cell's id in `detail`. A listener that finds the cell calls `preventDefault()`. */
export const REVEAL_CELL_EVENT = 'rpcbench:reveal';

/** Return the notebook that a node in a panel is of: the panel stands in its output, or else in one of its tabs. */
export type FindOwner = (node: Node) => NotebookPanel | null;

/** Return the cell with an id: that of `owner`, or else that of any open notebook. */
export function findCell(
  tracker: INotebookTracker, owner: NotebookPanel | null, id?: string
): { panel: NotebookPanel; cell: Cell } | null {
  const matches = (one: Cell) => one.model.id === id;
  const holds = (one: NotebookPanel) => one.content.widgets.some(matches);
  const panel = owner && holds(owner) ? owner : tracker.find(holds);
  const cell = panel?.content.widgets.find(matches);
  return panel && cell ? { panel, cell } : null;
}

/** Listen for the event on the whole page. `activate` shows the widget with an id. */
export function revealCells(tracker: INotebookTracker, ownerOf: FindOwner, activate: (id: string) => void): void {
  document.addEventListener(REVEAL_CELL_EVENT, event => {
    const id = (event as CustomEvent<{ cell?: string }>).detail?.cell;
    const found = findCell(tracker, ownerOf(event.target as Node), id);
    if (!found) {
      return;
    }
    event.preventDefault();
    const { panel, cell } = found;
    const { content } = panel;
    const index = content.widgets.indexOf(cell);
    activate(panel.id);
    content.activeCellIndex = index;
    content.deselectAll();
    void content.scrollToItem(index, 'center').then(() => {
      const colours = [{ backgroundColor: 'rgb(230 159 0 / 35%)' }, {}];
      content.widgets[index]?.node.animate(colours, 1500);
    });
  });
}
