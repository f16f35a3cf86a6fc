// The target picker in the toolbar of the active cell: notebook, a worker, or all. It writes the cell's first line, and
// shows what that line says, whoever wrote it. Notebooks that do not use rpcbench do not see it.

import type { Cell } from '@jupyterlab/cells';
import { Widget } from '@lumino/widgets';

import { aim } from './aim';
import type { Bench } from './bench';
import type { Benches } from './benches';
import { targetOf } from './remoteLine';
import { current } from './words';

const TITLE =
  "Where this cell runs: its first line, %%remote. Options on that line stay when the target changes; 'notebook' " +
  'takes the line away (undo brings it back).';
const HERE = '';

export class TargetPicker extends Widget {
  constructor(cell: Cell, benches: Benches) {
    super({ node: document.createElement('div') });
    this.addClass('rb-picker');
    this._cell = cell;
    this._benches = benches;
    this._select.title = TITLE;
    this._select.setAttribute('aria-label', 'Runs on');
    // The keys of a list that is open are not the notebook's.
    this._select.dataset.lmSuppressShortcuts = 'true';
    this._select.addEventListener('change', () => aim(cell, this._select.value || null));
    this.node.append(this._select);
    cell.model.contentChanged.connect(this._draw, this);
    this._draw();
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this._bench?.changed.disconnect(this._draw, this);
      this._cell.model?.contentChanged.disconnect(this._draw, this);
      super.dispose();
    }
  }

  /** JupyterLab takes each new toolbar for one without room until it is idle and looks; until then nothing may move. */
  protected override onAfterAttach(): void {
    requestIdleCallback(() => requestIdleCallback(() => this.addClass('rb-settled')));
  }

  private _draw(): void {
    if (this.isDisposed || this._cell.isDisposed) {
      return;
    }
    this._follow();
    const target = targetOf(this._cell.model.sharedModel.source);
    const options = this._options(target);
    const key = JSON.stringify(options);
    if (key !== this._drawn) {
      this._drawn = key;
      this._select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
    }
    this._select.value = target ?? HERE;
    this.setHidden(target === null && this._bench?.phase !== 'here');
  }

  /** Targets and what to call them. */
  private _options(target: string | null): [string, string][] {
    const auto = this._bench?.state?.auto;
    const workers = current(this._bench?.state ?? null)?.workers ?? [];
    const options: [string, string][] = [
      [HERE, auto ? `${auto} (%autoremote)` : 'notebook'],
      ...workers.map(({ name, state }): [string, string] => [name, state === 'lost' ? `${name} (lost)` : name])
    ];
    if (workers.length > 1) {
      options.push(['all', 'all']);
    }
    if (target !== null && !options.some(([value]) => value === target)) {
      options.push([target, target || '(nobody yet)']);
    }
    return options;
  }

  /** The cell is in no notebook yet when its toolbar is made. */
  private _follow(): void {
    const bench = this._benches.ofCell(this._cell);
    if (bench !== this._bench) {
      this._bench?.changed.disconnect(this._draw, this);
      bench?.changed.connect(this._draw, this);
      this._bench = bench;
    }
  }

  private readonly _cell: Cell;
  private readonly _benches: Benches;
  private readonly _select = document.createElement('select');
  private _bench: Bench | null = null;
  private _drawn = '';
}
