// Talking to a kernel that may be busy: each thing that is asked is a comm of its own, opened on a subshell.

import type { Kernel } from '@jupyterlab/services';
import type { JSONObject } from '@lumino/coreutils';

import type { Answer, Deed } from './words';

const TARGET = 'rpcbench';
const GONE: Kernel.Status[] = ['restarting', 'autorestarting', 'terminating', 'dead'];

export interface Ears {
  onMessage?: (data: JSONObject) => void;
  /** The kernel has closed it, or is gone; said once, and not after the page has closed it. */
  onEnd: (data: JSONObject) => void;
}

/** A comm that stays open until either side closes it. */
export class Line {
  constructor(kernel: Kernel.IKernelConnection, ears: Ears) {
    this._kernel = kernel;
    this._ears = ears;
    this._comm = kernel.createComm(TARGET);
    this._comm.onMsg = message => ears.onMessage?.(message.content.data as JSONObject);
    this._comm.onClose = message => this._end(message.content.data as JSONObject);
    kernel.statusChanged.connect(this._onStatus, this);
  }

  get id(): string {
    return this._comm.commId;
  }

  async open(data: JSONObject): Promise<void> {
    await this._kernel.info;
    // Without this the first words would go to the thread of the cell that runs.
    if (this._kernel.supportsSubshells && 'subshellStarted' in this._comm) {
      await this._comm.subshellStarted;
    }
    if (!this._over) {
      this._comm.open(data);
    }
  }

  close(): void {
    this._finish();
    if (!this._comm.isDisposed && !this._kernel.isDisposed) {
      this._comm.close();
    }
  }

  private _onStatus(_: Kernel.IKernelConnection, status: Kernel.Status): void {
    if (GONE.includes(status)) {
      this._end({ error: 'the kernel has gone' });
    }
  }

  private _end(data: JSONObject): void {
    if (!this._over) {
      this._finish();
      this._ears.onEnd(data);
    }
  }

  private _finish(): void {
    this._over = true;
    this._kernel.statusChanged.disconnect(this._onStatus, this);
  }

  private readonly _kernel: Kernel.IKernelConnection;
  private readonly _ears: Ears;
  private readonly _comm: Kernel.IComm;
  private _over = false;
}

/** Ask for one thing. The kernel answers by closing the comm. */
export async function ask(kernel: Kernel.IKernelConnection, deed: Deed): Promise<Answer> {
  return new Promise((resolve, reject) => {
    const line = new Line(kernel, { onEnd: data => resolve(data as Answer) });
    line.open({ ...deed }).catch(reject);
  });
}
