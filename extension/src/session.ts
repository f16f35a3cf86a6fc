// The connection to the rpcbench of one notebook's kernel: whether rpcbench is loaded there, and the state of its clusters.
// Guarantees
// - `changed` is emitted after each change of `phase`, `state`, `doing` and `notice`.
// - Nothing stale is shown: without a connection there is no state. A notice goes when a cluster comes or goes later, with the
//   next action, and with the kernel; one that is no error goes after a while, too.
// - A late reply of an earlier kernel or watch changes neither `phase` nor `state`.

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import { Busy } from './busy';
import { KernelComm, sendRequest } from './comm';
import { Lateness } from './lateness';
import { askWhetherLoaded, loadExtension, onLoaded } from './loaded';
import { current, FIRST_SIZE, PROTOCOL_VERSION, STRINGS, type KernelRequest, type Reply, type State } from './strings';

// The kernel drops a page that has not renewed its lease for 150 seconds (`SidebarWatchers`).
const RENEWAL_MILLISECONDS = 10_000;
const NOTICE_MILLISECONDS = 12_000;
// The result of an action and the change that it makes arrive within this time, in either order.
const SAME_MILLISECONDS = 2_000;

/**
 * none: there is no kernel, or it does not run Python. unknown: the page looks for the kernel, as after a reload, or has asked
 * it, and it replies when the running cell has ended. unconnected: the connection to the kernel is lost. absent: rpcbench is
 * not loaded. loading: the kernel loads it. loaded: the page watches its clusters.
 */
export type Phase = 'none' | 'unknown' | 'unconnected' | 'absent' | 'loading' | 'loaded';

/** A text for the user: the result of a request, or an error. */
export interface Notice {
  text: string;
  isError: boolean;
}

export class KernelSession implements IDisposable {
  constructor(context: ISessionContext) {
    this._context = context;
    this._busy = new Busy(context, () => this.changed.emit());
    context.kernelChanged.connect(this._onKernelChanged, this);
    context.statusChanged.connect(this._onStatus, this);
    context.connectionStatusChanged.connect(this._onConnection, this);
    onLoaded(context, () => ['unknown', 'absent'].includes(this._phase) && void this._watch());
    this._renewalTimer = window.setInterval(() => void this._renew(), RENEWAL_MILLISECONDS);
    this._onKernelChanged();
    void context.ready.then(() => this.kernel || this._onKernelChanged());
  }

  readonly changed = new Signal<this, void>(this);
  /** How old the state may be. */
  readonly lateness = new Lateness(() => this.changed.emit());

  get phase(): Phase {
    return this._phase;
  }

  /** The state that the kernel sent last; null before the first one. */
  get state(): State | null {
    return this._state;
  }

  /** Whether the kernel has been busy for a while: then it answers when its cell has ended. */
  get runsCell(): boolean {
    return this._busy.isLong;
  }

  /** How many workers the last cluster had: as many are proposed when none run. */
  get lastSize(): number {
    return this._lastSize;
  }

  /** The running actions: those that the kernel reports, and before its first report the one that this page asks for. */
  get doing(): string[] {
    const reported = this._state?.doing ?? [];
    return reported.length || !this._asked ? reported : [this._asked];
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
    window.clearTimeout(this._noticeTimer);
    this._busy.dispose();
    this.lateness.reset();
    this._closeWatch();
    Signal.clearData(this);
  }

  /** Show the user a text; an empty one clears the notice. */
  notify(text: string, isError = false): void {
    window.clearTimeout(this._noticeTimer);
    this._notice = text ? { text, isError } : null;
    this._noticedAt = Date.now();
    if (text && !isError) {
      this._noticeTimer = window.setTimeout(() => this.notify(''), NOTICE_MILLISECONDS);
    }
    this.changed.emit();
  }

  /**
   * Send a request and notify the user of its result. The kernel loads rpcbench first if it is not loaded. `asked` describes
   * the action until the kernel reports it.
   */
  async perform(request: KernelRequest, asked = ''): Promise<void> {
    this._asked = asked;
    this.notify('');
    try {
      if (this._phase !== 'absent' || (await this._load())) {
        await this._request(request);
      }
    } finally {
      this._asked = '';
      this.changed.emit();
    }
  }

  private async _request(request: KernelRequest): Promise<void> {
    const { kernel } = this;
    if (kernel) {
      const reply = await sendRequest(kernel, request).catch((error: unknown): Reply => ({ error: String(error) }));
      if (kernel === this.kernel && ['loaded', 'absent'].includes(this._phase)) {
        this.notify(reply.error ?? reply.text ?? STRINGS.notLoaded, !reply.text);
      }
    }
  }

  /** Ask the kernel again, after a cell that may have loaded rpcbench. */
  recheck(): void {
    if (this._phase === 'absent') {
      void this._detect();
    }
  }

  private _onKernelChanged(): void {
    this._forget(this._withoutReply);
    this._busy.follow();
    void this._detect();
  }

  /** The phase before the kernel has replied. JupyterLab first looks for the notebook's kernel, or starts one. */
  private get _withoutReply(): Phase {
    return this.kernel || ['initializing', 'starting'].includes(this._context.kernelDisplayStatus) ? 'unknown' : 'none';
  }

  private _onConnection(_: ISessionContext, status: Kernel.ConnectionStatus): void {
    if (status === 'connected' && this._phase === 'unconnected') {
      this._onKernelChanged();
    } else if (status !== 'connected' && !['none', 'unknown'].includes(this._phase)) {
      this._forget('unconnected');
    }
  }

  private _onStatus(_: ISessionContext, status: Kernel.Status): void {
    this._busy.follow();
    if (status === 'restarting' || status === 'autorestarting') {
      this._forget('unknown');
    } else if (status === 'dead') {
      this._forget('none');
    } else if (this._phase === 'unknown' && !this._isDetecting) {
      void this._detect(); // the first status after a restart
    }
  }

  private async _detect(): Promise<void> {
    this._isDetecting = true;
    await this._watchIfLoaded().finally(() => (this._isDetecting = false));
  }

  private async _watchIfLoaded(): Promise<void> {
    const { kernel } = this;
    const generation = this._generation;
    if (!kernel || (await kernel.info).language_info.name !== 'python') {
      return this._setPhase(kernel ? 'none' : this._withoutReply, generation);
    }
    const isLoaded = await askWhetherLoaded(kernel);
    if (isLoaded !== null && generation === this._generation && this._phase !== 'loaded') {
      await (isLoaded ? this._watch() : this._setPhase('absent', generation));
    }
  }

  /** Load rpcbench in the kernel, and begin to watch. Return whether that succeeded. */
  private async _load(): Promise<boolean> {
    const { kernel } = this;
    const generation = this._generation;
    this._setPhase('loading');
    const why = kernel ? await loadExtension(kernel) : null;
    if (generation !== this._generation || why === null) {
      return false;
    }
    if (why) {
      this._setPhase('absent');
      this.notify(STRINGS.loadFailed(why), true);
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
      const numbers = (one: State | null) => one?.clusters.map(({ number }) => number).join(' ');
      const hasChanged = this._state !== null && numbers(state) !== numbers(this._state);
      this._state = state;
      this._lastSize = current(state)?.workers.length || this._lastSize;
      if (hasChanged && Date.now() - this._noticedAt > SAME_MILLISECONDS) {
        this._notice = null;
      }
      this.changed.emit();
    } else {
      this.notify(STRINGS.otherVersion, true);
    }
  }

  /** Renew the lease of the watch. If it has expired, as on a computer that slept, open a new watch. */
  private async _renew(): Promise<void> {
    const { kernel, _comm: comm } = this;
    if (kernel && comm) {
      const send = () => sendRequest(kernel, { do: 'stay', watch: comm.id });
      const reply: Reply = await (kernel.supportsSubshells ? this.lateness.measure(send) : send()); // else it waits for a cell
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

  /** Forget all that the kernel has said. */
  private _forget(phase: Phase): void {
    this._closeWatch();
    this.lateness.reset();
    this._notice = null;
    this._asked = '';
    this._setPhase(phase);
  }

  private _setPhase(phase: Phase, generation = this._generation): void {
    if (generation === this._generation && !this._isDisposed) {
      this._phase = phase;
      this.changed.emit();
    }
  }

  private readonly _context: ISessionContext;
  private readonly _busy: Busy;
  private readonly _renewalTimer: number;
  private _noticeTimer = 0;
  private _noticedAt = 0;
  private _phase: Phase = 'unknown';
  private _state: State | null = null;
  private _notice: Notice | null = null;
  private _asked = '';
  private _lastSize = FIRST_SIZE;
  private _comm: KernelComm | null = null;
  private _generation = 0;
  private _isDetecting = false;
  private _isDisposed = false;
}
