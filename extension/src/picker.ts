// The target picker in the toolbar of the active cell: notebook, a worker, or all.
// Guarantees: the picker shows the target that the cell's first line names, also if the user typed it, and a choice edits
// only that line. It is hidden in notebooks that do not use rpcbench.

import type { Cell } from '@jupyterlab/cells';
import { Widget } from '@lumino/widgets';

import { dropTarget } from './dropTarget';
import { targetOf } from './remoteLine';
import type { KernelSession } from './session';
import type { KernelSessions } from './sessions';
import { current } from './strings';

const TITLE =
  "Where this cell runs: its first line, %%remote. Options on that line stay when the target changes; 'notebook' " +
  'removes the line (undo brings it back).';
const NOTEBOOK = ''; // the option's value for cells without `%%remote`

export class TargetPicker extends Widget {
  constructor(cell: Cell, sessions: KernelSessions) {
    super({ node: document.createElement('div') });
    this.addClass('rb-picker');
    this._cell = cell;
    this._sessions = sessions;
    this._select.title = TITLE;
    this._select.setAttribute('aria-label', 'Runs on');
    // The keys that a user presses in the open list must not run the notebook's shortcuts.
    this._select.dataset.lmSuppressShortcuts = 'true';
    this._select.addEventListener('change', () => dropTarget(cell, this._select.value || null));
    this.node.append(this._select);
    cell.model.contentChanged.connect(this._draw, this);
    this._draw();
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this._session?.changed.disconnect(this._draw, this);
      this._cell.model?.contentChanged.disconnect(this._draw, this);
      super.dispose();
    }
  }

  /**
   * Set the class for the layout two idle callbacks later. JupyterLab first treats each new toolbar as overlapping the code,
   * and measures it when the page is idle; the cell must not move before that.
   */
  protected override onAfterAttach(): void {
    requestIdleCallback(() => requestIdleCallback(() => this.addClass('rb-settled')));
  }

  private _draw(): void {
    if (this.isDisposed || this._cell.isDisposed) {
      return;
    }
    this._updateSession();
    const target = targetOf(this._cell.model.sharedModel.source);
    const options = this._options(target);
    const key = JSON.stringify(options);
    if (key !== this._drawn) {
      this._drawn = key;
      this._select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
    }
    this._select.value = target ?? NOTEBOOK;
    this.setHidden(target === null && this._session?.phase !== 'loaded');
  }

  /** Return the targets with their labels. */
  private _options(target: string | null): [string, string][] {
    const auto = this._session?.state?.auto;
    const workers = current(this._session?.state ?? null)?.workers ?? [];
    const options: [string, string][] = [
      [NOTEBOOK, auto ? `${auto} (%autoremote)` : 'notebook'],
      ...workers.map(({ name, state }): [string, string] => [name, state === 'lost' ? `${name} (lost)` : name])
    ];
    if (workers.length > 1) {
      options.push(['all', 'all']);
    }
    if (target !== null && !options.some(([value]) => value === target)) {
      options.push([target, target || '(no target yet)']);
    }
    return options;
  }

  /** Connect to the session of the cell's notebook. The constructor cannot: the cell is added to its notebook later. */
  private _updateSession(): void {
    const session = this._sessions.forCell(this._cell);
    if (session !== this._session) {
      this._session?.changed.disconnect(this._draw, this);
      session?.changed.connect(this._draw, this);
      this._session = session;
    }
  }

  private readonly _cell: Cell;
  private readonly _sessions: KernelSessions;
  private readonly _select = document.createElement('select');
  private _session: KernelSession | null = null;
  private _drawn = '';
}
