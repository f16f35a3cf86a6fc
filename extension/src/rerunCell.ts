// Runs a cell of a notebook again, after a click in the progress panel of any notebook or tab.
// Guarantees: only a cell that is still there, in the panel's own notebook, and still has the code that ran, is run. An event
// that only asks runs nothing.

import { NotebookActions, type INotebookTracker } from '@jupyterlab/notebook';

import { hasCode } from './cellCode';
import { findCell, type FindOwner } from './revealCell';

/** The event that panels send. A listener that runs the cell, or can, calls `preventDefault()`. */
export const RERUN_CELL_EVENT = 'rpcbench:rerun';

interface Request {
  /** The id of the cell. */
  cell?: string;
  code?: string;
  /** It asks whether the cell can run, and shall not run it. */
  isQuestion?: boolean;
}

/** Listen for the event on the whole page. */
export function rerunCells(tracker: INotebookTracker, ownerOf: FindOwner): void {
  document.addEventListener(RERUN_CELL_EVENT, event => {
    const { cell: id, code, isQuestion } = (event as CustomEvent<Request>).detail ?? {};
    const owner = ownerOf(event.target as Node);
    const found = findCell(tracker, owner, id);
    if (!found || found.panel !== owner || !code || !hasCode(found.cell.model.sharedModel.source, code)) {
      return;
    }
    event.preventDefault();
    if (!isQuestion) {
      const { content, sessionContext } = found.panel;
      void NotebookActions.runCells(content, [found.cell], sessionContext);
    }
  });
}
