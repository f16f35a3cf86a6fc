// Requests to a kernel that may be busy: each request is a comm of its own, opened on a subshell.
// Guarantees: a request reaches the kernel while a cell runs, if the kernel supports subshells. `onEnd` is called once, when
// the kernel closes the comm or is gone, and never after the page has closed it. A page that is left or reloaded closes the
// comms of its panels, so that the kernel does not go on computing them.

import type { Kernel } from '@jupyterlab/services';
import type { JSONObject } from '@lumino/coreutils';

import { STRINGS, type KernelRequest, type Reply } from './strings';

const COMM_TARGET = 'rpcbench';
const GONE: Kernel.Status[] = ['restarting', 'autorestarting', 'terminating', 'dead'];

// Not those of sessions: with the last comm JupyterLab ends the subshell, where the kernel has not closed the others yet.
const ofPanels = new Set<KernelComm>();
window.addEventListener('pagehide', () => ofPanels.forEach(comm => comm.close()));

export interface CommHandlers {
  onMessage?: (data: JSONObject) => void;
  /** Whether the comm is a panel's. */
  isPanel?: boolean;
  /** The kernel has closed the comm, with this data, or is gone: then `gone` is true. */
  onEnd: (data: JSONObject) => void;
}

/** A comm that stays open until the page or the kernel closes it. */
export class KernelComm {
  constructor(kernel: Kernel.IKernelConnection, handlers: CommHandlers) {
    this._kernel = kernel;
    this._handlers = handlers;
    this._comm = kernel.createComm(COMM_TARGET);
    this._comm.onMsg = message => handlers.onMessage?.(message.content.data as JSONObject);
    this._comm.onClose = message => this._end(message.content.data as JSONObject);
    kernel.statusChanged.connect(this._onStatus, this);
  }

  get id(): string {
    return this._comm.commId;
  }

  async open(data: JSONObject): Promise<void> {
    await this._kernel.info;
    // Before its subshell has started, a comm sends to the main shell, where the message waits for the running cell.
    if (this._kernel.supportsSubshells && 'subshellStarted' in this._comm) {
      await this._comm.subshellStarted;
    }
    if (!this._isClosed) {
      this._comm.open(data);
      if (this._handlers.isPanel) {
        ofPanels.add(this);
      }
    }
  }

  close(): void {
    this._detach();
    if (!this._comm.isDisposed && !this._kernel.isDisposed) {
      this._comm.close();
    }
  }

  private _onStatus(_: Kernel.IKernelConnection, status: Kernel.Status): void {
    if (GONE.includes(status)) {
      this._end({ error: STRINGS.kernelGone, gone: true });
    }
  }

  private _end(data: JSONObject): void {
    if (!this._isClosed) {
      this._detach();
      this._handlers.onEnd(data);
    }
  }

  private _detach(): void {
    this._isClosed = true;
    ofPanels.delete(this);
    this._kernel.statusChanged.disconnect(this._onStatus, this);
  }

  private readonly _kernel: Kernel.IKernelConnection;
  private readonly _handlers: CommHandlers;
  private readonly _comm: Kernel.IComm;
  private _isClosed = false;
}

/** Send one request and return its reply, which is the data with which the kernel closes the comm. */
export async function sendRequest(kernel: Kernel.IKernelConnection, request: KernelRequest): Promise<Reply> {
  return new Promise((resolve, reject) => {
    const comm = new KernelComm(kernel, { onEnd: data => resolve(data as Reply) });
    comm.open({ ...request }).catch(reject);
  });
}
