// The connection to the rpcbench of one notebook's kernel: whether rpcbench is loaded there, and the state of its clusters.
// Guarantees
// - The question whether rpcbench is loaded is silent: nothing appears in the notebook, its history or its prompt numbers.
// - `changed` is emitted after each change of `phase`, `state` and `notice`.
// - A late reply of an earlier kernel or watch changes neither `phase` nor `state`.

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import { KernelComm, sendRequest } from './comm';
import { PROTOCOL_VERSION, type KernelRequest, type Reply, type State } from './strings';

const LOAD = '%load_ext rpcbench';
const LOADED = "'rpcbench' in get_ipython().extension_manager.loaded";
// The kernel drops a page that has not renewed its lease for 150 seconds (`SidebarWatchers`).
const RENEWAL_MILLISECONDS = 30_000;

/**
 * none: there is no kernel, or it does not run Python. unknown: the page has asked the kernel, which replies when the running
 * cell has ended. absent: rpcbench is not loaded. loading: the kernel loads it. loaded: the page watches its clusters.
 */
export type Phase = 'none' | 'unknown' | 'absent' | 'loading' | 'loaded';

/** A text for the user: the result of a request, or an error. */
export interface Notice {
  text: string;
  isError: boolean;
}

export class KernelSession implements IDisposable {
  constructor(context: ISessionContext) {
    this._context = context;
    context.kernelChanged.connect(this._onKernelChanged, this);
    context.statusChanged.connect(this._onStatus, this);
    this._renewalTimer = window.setInterval(() => void this._renew(), RENEWAL_MILLISECONDS);
    this._onKernelChanged();
  }

  readonly changed = new Signal<this, void>(this);

  get phase(): Phase {
    return this._phase;
  }

  /** The state that the kernel sent last; null before the first one. */
  get state(): State | null {
    return this._state;
  }

  /** The result of the last request, or the last error. */
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
    window.clearInterval(this._renewalTimer);
    this._closeWatch();
    Signal.clearData(this);
  }

  /** Show the user a text; an empty one clears the notice. */
  notify(text: string, isError = false): void {
    this._notice = text ? { text, isError } : null;
    this.changed.emit();
  }

  /** Send a request and notify the user of its result. The kernel loads rpcbench first if it is not loaded. */
  async perform(request: KernelRequest): Promise<void> {
    this.notify('');
    if (this._phase === 'absent' && !(await this._load())) {
      return;
    }
    const { kernel } = this;
    if (kernel) {
      const reply = await sendRequest(kernel, request).catch((error: unknown): Reply => ({ error: String(error) }));
      this.notify(reply.error ?? reply.text ?? 'rpcbench is no longer loaded in this kernel.', !reply.text);
    }
  }

  /** Ask the kernel again, after a cell that may have loaded rpcbench. */
  recheck(): void {
    if (this._phase === 'absent') {
      void this._detect();
    }
  }

  private _onKernelChanged(): void {
    this._closeWatch();
    this._setPhase(this.kernel ? 'unknown' : 'none');
    void this._detect();
  }

  private _onStatus(_: ISessionContext, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting') {
      this._closeWatch();
      this._setPhase('unknown');
    } else if (this._phase === 'unknown' && !this._isDetecting) {
      void this._detect(); // the first status after a restart
    }
  }

  private async _detect(): Promise<void> {
    this._isDetecting = true;
    await this._askWhetherLoaded().finally(() => (this._isDetecting = false));
  }

  /** Ask the kernel silently, and begin to watch if rpcbench is loaded. A busy kernel replies after its cell. */
  private async _askWhetherLoaded(): Promise<void> {
    const { kernel } = this;
    const generation = this._generation;
    if (!kernel || (await kernel.info).language_info.name !== 'python') {
      return this._setPhase('none', generation);
    }
    const question = { code: '', silent: true, store_history: false, user_expressions: { here: LOADED } };
    const reply = await kernel.requestExecute(question).done.catch(() => null);
    if (!reply || generation !== this._generation || this._phase === 'loaded') {
      return;
    }
    const content = reply.content;
    const isLoaded = content.status === 'ok' && JSON.stringify(content.user_expressions).includes('"True"');
    await (isLoaded ? this._watch() : this._setPhase('absent', generation));
  }

  /** Run `%load_ext rpcbench` in the kernel, and begin to watch. Return whether that succeeded. */
  private async _load(): Promise<boolean> {
    const { kernel } = this;
    const generation = this._generation;
    this._setPhase('loading');
    const reply = await kernel?.requestExecute({ code: LOAD, silent: true, store_history: false }).done;
    if (generation !== this._generation || !reply) {
      return false;
    }
    if (reply.content.status !== 'ok') {
      const why = reply.content.status === 'error' ? reply.content.evalue : 'it was interrupted';
      this._setPhase('absent');
      this.notify(`${LOAD} failed in this notebook's kernel: ${why}`, true);
      return false;
    }
    await this._watch();
    return true;
  }

  /** Open the comm on which the kernel sends its state. */
  private async _watch(): Promise<void> {
    const { kernel } = this;
    if (!kernel) {
      return;
    }
    this._closeWatch();
    const generation = this._generation;
    this._comm = new KernelComm(kernel, {
      onMessage: data => this._onState(data as unknown as State & { problem?: string }),
      onEnd: () => {
        this._closeWatch();
        this._setPhase('absent');
      }
    });
    this._setPhase('loaded', generation);
    await this._comm.open({ do: 'watch' });
  }

  private _onState(state: State & { problem?: string }): void {
    if (state.problem !== undefined) {
      this.notify(state.problem, true);
    } else if (state.speaks === PROTOCOL_VERSION) {
      this._state = state;
      this.changed.emit();
    } else {
      this.notify('This kernel and this page have different versions of rpcbench: install the same version for both.', true);
    }
  }

  /** Renew the lease of the watch. If it has expired, as on a computer that slept, open a new watch. */
  private async _renew(): Promise<void> {
    const { kernel, _comm: comm } = this;
    if (kernel && comm) {
      const reply: Reply = await sendRequest(kernel, { do: 'stay', watch: comm.id });
      if (reply.there === false && comm === this._comm) {
        await this._watch();
      }
    }
  }

  /** Close the comm and begin a new generation: pending results of the old one are ignored. */
  private _closeWatch(): void {
    this._generation += 1;
    this._comm?.close();
    this._comm = null;
    this._state = null;
  }

  private _setPhase(phase: Phase, generation = this._generation): void {
    if (generation === this._generation && !this._isDisposed) {
      this._phase = phase;
      this.changed.emit();
    }
  }

  private readonly _context: ISessionContext;
  private readonly _renewalTimer: number;
  private _phase: Phase = 'none';
  private _state: State | null = null;
  private _notice: Notice | null = null;
  private _comm: KernelComm | null = null;
  private _generation = 0;
  private _isDetecting = false;
  private _isDisposed = false;
}
