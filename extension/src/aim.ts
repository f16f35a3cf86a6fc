// Changing where a cell runs, by an edit of its first line that can be undone like any other.

import type { Cell } from '@jupyterlab/cells';

import { retarget } from './remoteLine';

/** `null` is the notebook. False for a cell that does not run. */
export function aim(cell: Cell | null | undefined, target: string | null): boolean {
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
