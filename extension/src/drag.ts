// Drag and drop of workers: a user drags a worker from the sidebar to a code cell, which then runs on that worker.
// Guarantees: only code cells accept a worker, and their editor does not insert the dragged text. Any other place that
// accepts text receives `%%remote worker1`.

import type { NotebookPanel } from '@jupyterlab/notebook';

import { dropTarget } from './dropTarget';

const MIME_TYPE = 'application/x-rpcbench-worker';
const OVER_CLASS = 'rb-over';

/** Put the worker into the data of a drag that begins. */
export function startDrag(transfer: DataTransfer, worker: string): void {
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
  const highlight = (over?: Element) => {
    panel.node.querySelectorAll(`.${OVER_CLASS}`).forEach(one => one !== over && one.classList.remove(OVER_CLASS));
    over?.classList.add(OVER_CLASS);
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
  panel.node.addEventListener('dragleave', () => highlight(), true);
  panel.node.addEventListener('drop', event => {
    dropTarget(acceptingCell(event), event.dataTransfer?.getData(MIME_TYPE) || null);
    highlight();
  }, true);
}
