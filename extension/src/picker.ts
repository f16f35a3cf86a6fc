// The target picker in the toolbar of the active cell: notebook, a worker, or all.
// Guarantees: the picker shows the target that the cell's first line names, also if the user typed it, and a choice edits
// only that line. It is hidden in notebooks that do not use rpcbench, and in cells that are no code.

import type { Cell } from '@jupyterlab/cells';
import { caretDownEmptyIcon } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';

import { dropTarget } from './dropTarget';
import { targetOf } from './remoteLine';
import type { KernelSession } from './session';
import type { KernelSessions } from './sessions';
import { ALL, current, STRINGS } from './strings';

const NOTEBOOK = ''; // the option's value for cells without `%%remote`

export class TargetPicker extends Widget {
  constructor(cell: Cell, sessions: KernelSessions) {
    super({ node: document.createElement('div') });
    this.addClass('rbx-picker');
    this._cell = cell;
    this._sessions = sessions;
    this._select.title = STRINGS.picker.title;
    this._select.setAttribute('aria-label', STRINGS.runsOn);
    // The keys that a user presses in the open list must not run the notebook's shortcuts.
    this._select.dataset.lmSuppressShortcuts = 'true';
    this._select.addEventListener('change', () => dropTarget(cell, this._select.value || null));
    // JupyterLab's own look of a list, as in the notebook's toolbar.
    this.addClass('jp-HTMLSelect');
    this.addClass('jp-DefaultStyle');
    this.node.append(this._select, caretDownEmptyIcon.element({ tag: 'span', stylesheet: 'select', right: '7px', top: '5px' }));
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
    requestIdleCallback(() => requestIdleCallback(() => this.addClass('rbx-settled')));
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
    this.setHidden(this._cell.model.type !== 'code' || (target === null && this._session?.phase !== 'loaded'));
  }

  /** Return the targets with their labels. */
  private _options(target: string | null): [string, string][] {
    const words = STRINGS.picker;
    const auto = this._session?.state?.auto;
    const workers = current(this._session?.state ?? null)?.workers ?? [];
    const options: [string, string][] = [
      [NOTEBOOK, auto ? words.auto(auto) : words.notebook],
      ...workers.map(({ name, state }): [string, string] => [name, state === 'lost' ? words.lost(name) : name])
    ];
    if (workers.length > 1) {
      options.push([ALL, ALL]);
    }
    if (target !== null && !options.some(([value]) => value === target)) {
      options.push([target, target || words.none]);
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
