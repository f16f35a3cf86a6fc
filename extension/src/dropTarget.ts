// Changes where a cell runs: the one place that edits a cell's target, for the picker, the commands and dropped workers.
// Guarantees: only the first line of the cell changes, and the edit is one step that the user can undo.

import type { Cell } from '@jupyterlab/cells';

import { retarget } from './remoteLine';

/** Make the cell run on `target`, or in the notebook if it is `null`. Return false if the cell is not a code cell. */
export function dropTarget(cell: Cell | null | undefined, target: string | null): boolean {
  if (cell?.model.type !== 'code') {
    return false;
  }
  const shared = cell.model.sharedModel;
  const edit = retarget(shared.source, target);
  if (edit) {
    shared.updateSource(edit.start, edit.end, edit.text);
  }
  return true;
}
