// The item in the status bar: the number of workers of the current notebook, how many are lost, and a chip for each mode that
// is on. A click on the text shows the sidebar. JupyterLab shows the item only while rpcbench is loaded in the kernel.
// Guarantee: no number is shown before the kernel has said it.

import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import { ModeChips } from './modes';
import type { KernelSessions } from './sessions';
import { STRINGS } from './strings';

export class StatusItem extends ReactWidget {
  constructor(sessions: KernelSessions, activate: () => void) {
    super();
    this.addClass('rbx-status');
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
      <>
        <button className="rbx-status-button" onClick={this._activate} title={STRINGS.status.title}>
          {this._text()}
        </button>
        <ModeChips session={this._sessions.current} />
      </>
    );
  }

  private _text(): string {
    const session = this._sessions.current;
    if (!session?.state) {
      return STRINGS.status.waits;
    }
    const workers = session.state.clusters.flatMap(cluster => cluster.workers);
    const lost = workers.filter(worker => worker.state === 'lost').length;
    const { seconds } = session.lateness;
    const late = seconds ? STRINGS.status.late(seconds) : '';
    return session.doing[0] ?? STRINGS.status.text(workers.length, lost) + late;
  }

  private readonly _sessions: KernelSessions;
  private readonly _activate: () => void;
}
