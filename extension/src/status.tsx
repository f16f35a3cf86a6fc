// The item in the status bar: the number of workers of the current notebook, and how many are lost. A click shows the
// sidebar. JupyterLab shows the item only while rpcbench is loaded in the notebook's kernel.

import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import type { KernelSessions } from './sessions';
import { count } from './strings';

export class StatusItem extends ReactWidget {
  constructor(sessions: KernelSessions, activate: () => void) {
    super();
    this.addClass('rb-status');
    this._sessions = sessions;
    this._activate = activate;
    sessions.changed.connect(this._onChanged, this);
    this._onChanged();
  }

  get isShown(): boolean {
    return this._sessions.current?.phase === 'loaded';
  }

  private _onChanged(): void {
    this.update();
  }

  protected override render(): React.JSX.Element {
    return (
      <button className="rb-status-button" onClick={this._activate} title="Show the workers in the sidebar">
        {this._text()}
      </button>
    );
  }

  private _text(): string {
    const state = this._sessions.current?.state;
    const workers = state?.clusters.flatMap(cluster => cluster.workers) ?? [];
    const lost = workers.filter(worker => worker.state === 'lost').length;
    const doing = state?.doing[0];
    return doing ?? `rpcbench: ${workers.length ? count(workers.length) : 'no workers'}${lost ? `, ${lost} lost` : ''}`;
  }

  private readonly _sessions: KernelSessions;
  private readonly _activate: () => void;
}
