// What the page knows of one notebook's kernel: whether rpcbench is loaded there, and how its clusters stand.

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import { Line, ask } from './talk';
import { SPEAKS, type Answer, type Deed, type State } from './words';

const LOAD = '%load_ext rpcbench';
const LOADED = "'rpcbench' in get_ipython().extension_manager.loaded";
const STAY_MILLISECONDS = 30_000;

/**
 * none: no kernel, or one that is no Python; unknown: it is being asked, and answers once its cell has ended; absent:
 * rpcbench is not loaded there; loading: it is being loaded; here: it is loaded.
 */
export type Phase = 'none' | 'unknown' | 'absent' | 'loading' | 'here';

export interface Notice {
  text: string;
  bad: boolean;
}

export class Bench implements IDisposable {
  constructor(context: ISessionContext) {
    this._context = context;
    context.kernelChanged.connect(this._begin, this);
    context.statusChanged.connect(this._onStatus, this);
    this._stay = window.setInterval(() => void this._renew(), STAY_MILLISECONDS);
    this._begin();
  }

  readonly changed = new Signal<this, void>(this);

  get phase(): Phase {
    return this._phase;
  }

  get state(): State | null {
    return this._state;
  }

  /** What the last deed has brought, in the kernel's words. */
  get notice(): Notice | null {
    return this._notice;
  }

  get kernel(): Kernel.IKernelConnection | null {
    return this._context.session?.kernel ?? null;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  dispose(): void {
    this._isDisposed = true;
    window.clearInterval(this._stay);
    this._drop();
    Signal.clearData(this);
  }

  say(text: string, bad = false): void {
    this._notice = text ? { text, bad } : null;
    this.changed.emit();
  }

  /** Ask for a deed and tell what came of it; rpcbench is loaded first where it is not. */
  async perform(deed: Deed): Promise<void> {
    this.say('');
    if (this._phase === 'absent' && !(await this._load())) {
      return;
    }
    const { kernel } = this;
    if (kernel) {
      const answer = await ask(kernel, deed).catch((error: unknown): Answer => ({ error: String(error) }));
      this.say(answer.error ?? answer.text ?? 'rpcbench is not loaded in this kernel any more.', !answer.text);
    }
  }

  /** A cell has run that may have loaded rpcbench. */
  lookAgain(): void {
    if (this._phase === 'absent') {
      void this._find();
    }
  }

  private _begin(): void {
    this._drop();
    this._become(this.kernel ? 'unknown' : 'none');
    void this._find();
  }

  private _onStatus(_: ISessionContext, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting') {
      this._drop();
      this._become('unknown');
    } else if (this._phase === 'unknown' && !this._finding) {
      void this._find();
    }
  }

  private async _find(): Promise<void> {
    this._finding = true;
    await this._ask().finally(() => (this._finding = false));
  }

  /** Ask whether rpcbench is loaded, without leaving a trace; a busy kernel answers later. */
  private async _ask(): Promise<void> {
    const { kernel } = this;
    const turn = this._turn;
    if (!kernel || (await kernel.info).language_info.name !== 'python') {
      return this._become('none', turn);
    }
    const asked = { code: '', silent: true, store_history: false, user_expressions: { here: LOADED } };
    const reply = await kernel.requestExecute(asked).done.catch(() => null);
    if (!reply || turn !== this._turn || this._phase === 'here') {
      return;
    }
    const content = reply.content;
    const here = content.status === 'ok' && JSON.stringify(content.user_expressions).includes('"True"');
    await (here ? this._watch() : this._become('absent', turn));
  }

  private async _load(): Promise<boolean> {
    const { kernel } = this;
    const turn = this._turn;
    this._become('loading');
    const reply = await kernel?.requestExecute({ code: LOAD, silent: true, store_history: false }).done;
    if (turn !== this._turn || !reply) {
      return false;
    }
    if (reply.content.status !== 'ok') {
      const why = reply.content.status === 'error' ? reply.content.evalue : 'it was interrupted';
      this._become('absent');
      this.say(`${LOAD} failed in this notebook's kernel: ${why}`, true);
      return false;
    }
    await this._watch();
    return true;
  }

  private async _watch(): Promise<void> {
    const { kernel } = this;
    if (!kernel) {
      return;
    }
    this._drop();
    const turn = this._turn;
    this._line = new Line(kernel, {
      onMessage: data => this._see(data as unknown as State & { problem?: string }),
      onEnd: () => {
        this._drop();
        this._become('absent');
      }
    });
    this._become('here', turn);
    await this._line.open({ do: 'watch' });
  }

  private _see(state: State & { problem?: string }): void {
    if (state.problem !== undefined) {
      this.say(state.problem, true);
    } else if (state.speaks === SPEAKS) {
      this._state = state;
      this.changed.emit();
    } else {
      this.say("The rpcbench of this kernel and the one of this page are of different versions: install the same.", true);
    }
  }

  /** The kernel forgets pages that it does not hear of; one that slept begins anew. */
  private async _renew(): Promise<void> {
    const { kernel, _line: line } = this;
    if (kernel && line) {
      const answer: Answer = await ask(kernel, { do: 'stay', watch: line.id });
      if (answer.there === false && line === this._line) {
        await this._watch();
      }
    }
  }

  private _drop(): void {
    this._turn += 1;
    this._line?.close();
    this._line = null;
    this._state = null;
  }

  private _become(phase: Phase, turn = this._turn): void {
    if (turn === this._turn && !this._isDisposed) {
      this._phase = phase;
      this.changed.emit();
    }
  }

  private readonly _context: ISessionContext;
  private readonly _stay: number;
  private _phase: Phase = 'none';
  private _state: State | null = null;
  private _notice: Notice | null = null;
  private _line: Line | null = null;
  private _turn = 0;
  private _finding = false;
  private _isDisposed = false;
}
