// The sidebar: the clusters of the current notebook, or a form that starts one.
// It draws the current session anew after each change and keeps no state of its own.

import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import type { Actions } from './actions';
import { ClusterCard } from './cluster';
import { rpcbenchIcon } from './icons';
import type { KernelSession } from './session';
import type { KernelSessions } from './sessions';
import { StartForm } from './start';

export class Sidebar extends ReactWidget {
  constructor(sessions: KernelSessions, actions: Actions) {
    super();
    this.id = 'rpcbench-sidebar';
    this.addClass('rb-sidebar');
    this.title.icon = rpcbenchIcon;
    this.title.caption = 'rpcbench: workers';
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', 'rpcbench: workers');
    this._sessions = sessions;
    this._actions = actions;
    sessions.changed.connect(() => this.update());
  }

  protected override render(): React.JSX.Element {
    const session = this._sessions.current;
    const name = this._sessions.notebook?.title.label;
    return (
      <>
        <header className="rb-head">
          <h2>Workers</h2>
          {name && <span className="rb-of">{name}</span>}
        </header>
        {session ? this._body(session) : <p className="rb-hint">Open a notebook to start workers for it.</p>}
        <News session={session} />
      </>
    );
  }

  private _body(session: KernelSession): React.JSX.Element {
    switch (session.phase) {
      case 'none':
        return <p className="rb-hint">This notebook has no Python kernel.</p>;
      case 'unknown':
        return <p className="rb-hint">Waiting for the kernel…</p>;
      case 'loading':
        return <p className="rb-hint">Running %load_ext rpcbench in the kernel, once the running cell has ended…</p>;
      case 'absent':
        return <StartForm loads={true} disabled={false} actions={this._actions} />;
      case 'loaded':
        return this._clusters(session);
    }
  }

  private _clusters(session: KernelSession): React.JSX.Element {
    const { state } = session;
    if (!state) {
      return <p className="rb-hint">Waiting for the kernel…</p>;
    }
    const busy = state.doing.length > 0;
    const several = state.clusters.length > 1;
    return (
      <>
        {state.clusters.map(one => (
          <ClusterCard key={one.name} cluster={one} several={several} disabled={busy} actions={this._actions} />
        ))}
        {state.clusters.length === 0 && <StartForm loads={false} disabled={busy} actions={this._actions} />}
        {state.clusters.length > 0 && state.panels.length > 0 && <Panels names={state.panels} actions={this._actions} />}
      </>
    );
  }

  private readonly _sessions: KernelSessions;
  private readonly _actions: Actions;
}

function Panels({ names, actions }: { names: string[]; actions: Actions }): React.JSX.Element {
  return (
    <section className="rb-panels" aria-label="Panels">
      <h3>Panels</h3>
      <div>
        {names.map(name => (
          <button key={name} className="rb-button" onClick={() => void actions.openPanel(name)} title={`Open the panel ${name} in a tab`}>
            {name}
          </button>
        ))}
      </div>
    </section>
  );
}

/** The running actions and the session's notice; screen readers announce both. */
function News({ session }: { session: KernelSession | null }): React.JSX.Element {
  const doing = session?.state?.doing ?? [];
  const notice = session?.notice;
  return (
    <div className="rb-news">
      <div role="status" className="rb-doing">
        {doing.join('\n')}
        {!notice?.isError && notice?.text}
      </div>
      <div role="alert" className="rb-bad">
        {notice?.isError && notice.text}
      </div>
    </div>
  );
}
