// A worker that is dragged from the sidebar and dropped on a cell: the cell runs there from then on. Elsewhere the same
// drag drops text, `%%remote worker1`.

import type { NotebookPanel } from '@jupyterlab/notebook';

import { aim } from './aim';

const KIND = 'application/x-rpcbench-worker';
const OVER = 'rb-over';

/** Begin to drag a worker. */
export function drag(transfer: DataTransfer, worker: string): void {
  transfer.setData(KIND, worker);
  transfer.setData('text/plain', `%%remote ${worker}\n`);
  transfer.effectAllowed = 'copy';
}

/** Let workers be dropped on the cells of this notebook. */
export function acceptWorkers(panel: NotebookPanel): void {
  const cellAt = (event: DragEvent) => {
    const at = event.target;
    return panel.content.widgets.find(cell => cell.model.type === 'code' && at instanceof Node && cell.node.contains(at));
  };
  const mark = (over?: Element) => {
    panel.node.querySelectorAll(`.${OVER}`).forEach(one => one !== over && one.classList.remove(OVER));
    over?.classList.add(OVER);
  };
  const taken = (event: DragEvent) => {
    const cell = event.dataTransfer?.types.includes(KIND) ? cellAt(event) : undefined;
    if (cell) {
      event.preventDefault();
      event.stopPropagation(); // the editor would take it as text
    }
    return cell;
  };
  // Before the editors hear of it.
  panel.node.addEventListener('dragover', event => mark(taken(event)?.node), true);
  panel.node.addEventListener('dragleave', () => mark(), true);
  panel.node.addEventListener('drop', event => {
    aim(taken(event), event.dataTransfer?.getData(KIND) || null);
    mark();
  }, true);
}
