// How late the kernel's messages reach this page. A page under load works off a queue in order, so it may show an old state after
// the kernel has sent a newer one.
// Guarantees: the lateness is 0 up to `LATE_SECONDS`. The reply to a request comes behind all earlier messages, so the shown state is
// at most as old as the latest round trip took, or takes already. While a request waits, `changed` is called each second.

const LATE_SECONDS = 3;

export class Lateness {
  constructor(changed: () => void) {
    this._changed = changed;
  }

  /** How many seconds old the shown state may be; 0 if it is not late. */
  get seconds(): number {
    const [oldest = Infinity] = this._waiting;
    const wait = Date.now() - oldest;
    const seconds = Math.floor(Math.max(this._roundTrip, wait) / 1000);
    return seconds > LATE_SECONDS ? seconds : 0;
  }

  /** Send a request that does not wait for a cell, and return its reply. */
  async measure<T>(send: () => Promise<T>): Promise<T> {
    const [waiting, sentAt] = [this._waiting, Date.now()];
    waiting.push(sentAt);
    this._timer ||= window.setInterval(() => this.seconds && this._changed(), 1000);
    try {
      return await send();
    } finally {
      if (waiting === this._waiting) {
        waiting.shift(); // replies come in the order of requests
        this._roundTrip = Date.now() - sentAt;
        this._stopUnlessWaiting();
        this._changed();
      }
    }
  }

  /** Forget all round trips, also those that are under way: the kernel is another one. */
  reset(): void {
    this._roundTrip = 0;
    this._waiting = [];
    this._stopUnlessWaiting();
  }

  private _stopUnlessWaiting(): void {
    if (!this._waiting.length) {
      window.clearInterval(this._timer);
      this._timer = 0;
    }
  }

  private readonly _changed: () => void;
  private _roundTrip = 0;
  private _waiting: number[] = []; // the times of the requests without a reply, the oldest first
  private _timer = 0;
}
