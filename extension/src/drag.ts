// Drag and drop of workers: a user drags a worker from the sidebar to a code cell, which then runs on that worker.
// Guarantees: only code cells accept a worker, and their editor does not insert the dragged text. Any other place that
// accepts text receives `%%remote worker1`. The cell under the pointer says where it would run.

import type { NotebookPanel } from '@jupyterlab/notebook';

import { dropTarget } from './dropTarget';
import { STRINGS } from './strings';

const MIME_TYPE = 'application/x-rpcbench-worker';
const OVER_CLASS = 'rbx-over';
let dragged = ''; // the worker; a page may not read the data of a drag before the drop

/** Put the worker into the data of a drag that begins. */
export function startDrag(transfer: DataTransfer, worker: string): void {
  dragged = worker;
  transfer.setData(MIME_TYPE, worker);
  transfer.setData('text/plain', `%%remote ${worker}\n`);
  transfer.effectAllowed = 'copy';
}

/** Make the code cells of this notebook accept workers. */
export function acceptWorkers(panel: NotebookPanel): void {
  const cellAt = (event: DragEvent) => {
    const node = event.target;
    return panel.content.widgets.find(cell => cell.model.type === 'code' && node instanceof Node && cell.node.contains(node));
  };
  const highlight = (over?: HTMLElement) => {
    panel.node.querySelectorAll(`.${OVER_CLASS}`).forEach(one => one !== over && one.classList.remove(OVER_CLASS));
    if (over) {
      over.classList.add(OVER_CLASS);
      over.dataset['rbxDrop'] = STRINGS.worker.drop(dragged);
    }
  };
  const acceptingCell = (event: DragEvent) => {
    const cell = event.dataTransfer?.types.includes(MIME_TYPE) ? cellAt(event) : undefined;
    if (cell) {
      event.preventDefault();
      event.stopPropagation(); // otherwise the editor inserts the text
    }
    return cell;
  };
  // Capturing listeners run before the editors' own listeners.
  panel.node.addEventListener('dragover', event => highlight(acceptingCell(event)?.node), true);
  panel.node.addEventListener('dragleave', event => {
    if (!(event.relatedTarget instanceof Node && panel.node.contains(event.relatedTarget))) {
      highlight(); // it has left the notebook, not only one of its elements for another one
    }
  }, true);
  panel.node.addEventListener('drop', event => {
    dropTarget(acceptingCell(event), event.dataTransfer?.getData(MIME_TYPE) || null);
    highlight();
  }, true);
}
