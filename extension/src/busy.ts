// Whether a notebook's kernel has been busy for a while: then it answers when its cell has ended.
// Guarantee: a short cell changes nothing, so what is shown does not flicker.

import type { ISessionContext } from '@jupyterlab/apputils';

const SHORT_CELL_MILLISECONDS = 700;

export class Busy {
  constructor(context: ISessionContext, changed: () => void) {
    this._context = context;
    this._changed = changed;
  }

  get isLong(): boolean {
    return this._isLong;
  }

  /** Look at the kernel's status, after each change of it. */
  follow(): void {
    if (!this._isNow) {
      window.clearTimeout(this._timer);
      this._timer = 0;
      this._set(false);
    } else if (!this._timer) {
      this._timer = window.setTimeout(() => this._set(this._isNow), SHORT_CELL_MILLISECONDS);
    }
  }

  dispose(): void {
    window.clearTimeout(this._timer);
  }

  private get _isNow(): boolean {
    return this._context.session?.kernel?.status === 'busy';
  }

  private _set(value: boolean): void {
    if (value !== this._isLong) {
      this._isLong = value;
      this._changed();
    }
  }

  private readonly _context: ISessionContext;
  private readonly _changed: () => void;
  private _timer = 0;
  private _isLong = false;
}
