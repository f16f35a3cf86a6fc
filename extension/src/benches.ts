// One bench for each open notebook, and which of them the sidebar shows: that of the notebook looked at last.

import type { Cell } from '@jupyterlab/cells';
import { NotebookActions, type INotebookTracker, type NotebookPanel } from '@jupyterlab/notebook';
import { Signal } from '@lumino/signaling';

import { Bench } from './bench';

export class Benches {
  constructor(tracker: INotebookTracker) {
    this._tracker = tracker;
    tracker.currentChanged.connect(this._onCurrent, this);
    NotebookActions.executed.connect((_, { notebook, cell }) => {
      const panel = tracker.find(one => one.content === notebook);
      if (panel && cell.model.sharedModel.source.includes('rpcbench')) {
        this.of(panel).lookAgain();
      }
    });
    this._onCurrent();
  }

  /** Another notebook is looked at, or the one that is has changed. */
  readonly changed = new Signal<this, void>(this);

  get notebook(): NotebookPanel | null {
    return this._tracker.currentWidget;
  }

  get current(): Bench | null {
    return this.notebook && this.of(this.notebook);
  }

  of(panel: NotebookPanel): Bench {
    const known = this._known.get(panel);
    if (known) {
      return known;
    }
    const bench = new Bench(panel.sessionContext);
    this._known.set(panel, bench);
    bench.changed.connect(() => bench === this.current && this.changed.emit());
    panel.disposed.connect(() => bench.dispose());
    return bench;
  }

  /** The bench of the notebook that a cell is in. */
  ofCell(cell: Cell): Bench | null {
    const panel = this._tracker.find(one => one.content.widgets.includes(cell));
    return panel ? this.of(panel) : null;
  }

  private _onCurrent(): void {
    this.changed.emit();
  }

  private readonly _tracker: INotebookTracker;
  private readonly _known = new WeakMap<NotebookPanel, Bench>();
}
