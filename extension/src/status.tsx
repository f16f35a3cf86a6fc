// The item in the status bar: how many workers the notebook has, and whether one is lost. A click shows the sidebar.

import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import type { Benches } from './benches';
import { count } from './words';

export class StatusItem extends ReactWidget {
  constructor(benches: Benches, activate: () => void) {
    super();
    this.addClass('rb-status');
    this._benches = benches;
    this._activate = activate;
    benches.changed.connect(this._onChanged, this);
    this._onChanged();
  }

  get isShown(): boolean {
    return this._benches.current?.phase === 'here';
  }

  private _onChanged(): void {
    this.update();
  }

  protected override render(): React.JSX.Element {
    return (
      <button className="rb-status-button" onClick={this._activate} title="Show the workers in the sidebar">
        {this._words()}
      </button>
    );
  }

  private _words(): string {
    const state = this._benches.current?.state;
    const workers = state?.clusters.flatMap(cluster => cluster.workers) ?? [];
    const lost = workers.filter(worker => worker.state === 'lost').length;
    const doing = state?.doing[0];
    return doing ?? `rpcbench: ${workers.length ? count(workers.length) : 'no workers'}${lost ? `, ${lost} lost` : ''}`;
  }

  private readonly _benches: Benches;
  private readonly _activate: () => void;
}
