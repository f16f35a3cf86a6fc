// The sidebar: the clusters of the current notebook, or a form that starts one.
// It draws the current session anew after each change and keeps no state of its own.

import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import type { Actions } from './actions';
import { ClusterCard } from './cluster';
import { rpcbenchIcon } from './icons';
import { ModeChips } from './modes';
import { Progress } from './progress';
import type { KernelSession } from './session';
import type { KernelSessions } from './sessions';
import { StartForm } from './start';
import { current, DASHBOARD, STRINGS } from './strings';

export class Sidebar extends ReactWidget {
  constructor(sessions: KernelSessions, actions: Actions) {
    super();
    this.id = 'rpcbench-sidebar';
    this.addClass('rbx-sidebar');
    this.title.icon = rpcbenchIcon;
    this.title.caption = STRINGS.sidebar;
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', STRINGS.sidebar);
    this._sessions = sessions;
    this._actions = actions;
    sessions.changed.connect(() => this.update());
  }

  protected override render(): React.JSX.Element {
    const session = this._sessions.current;
    const name = this._sessions.notebook?.title.label;
    return (
      <>
        <header className="rbx-head">
          <h2>{STRINGS.workers}</h2>
          {name && <span className="rbx-of">{name}</span>}
        </header>
        {session ? this._body(session) : <p className="rbx-hint">{STRINGS.noNotebook}</p>}
        <News session={session} />
      </>
    );
  }

  private _body(session: KernelSession): React.JSX.Element {
    switch (session.phase) {
      case 'none':
        return <p className="rbx-hint">{STRINGS.noKernel}</p>;
      case 'unknown':
        return <p className="rbx-hint">{STRINGS.waitsForKernel}</p>;
      case 'unconnected':
        return <p className="rbx-hint">{STRINGS.noConnection}</p>;
      case 'loading':
        return <p className="rbx-hint">{STRINGS.loading}</p>;
      case 'absent':
        return this._startForm(session, session.runsCell);
      case 'loaded':
        return this._clusters(session);
    }
  }

  /** The form begins anew with the number of workers of another cluster. */
  private _startForm({ phase, lastSize, runsCell }: KernelSession, disabled: boolean): React.JSX.Element {
    const loads = phase === 'absent';
    const about = { loads, first: lastSize, waits: loads && runsCell, disabled, actions: this._actions };
    return <StartForm key={lastSize} {...about} />;
  }

  private _clusters(session: KernelSession): React.JSX.Element {
    const { state } = session;
    if (!state) {
      return <p className="rbx-hint">{STRINGS.waitsForKernel}</p>;
    }
    const busy = session.doing.length > 0;
    const several = state.clusters.length > 1;
    return (
      <>
        {session.lateness.seconds > 0 && <p className="rbx-hint">{STRINGS.late(session.lateness.seconds)}</p>}
        {state.modes.length > 0 && (
          <section className="rbx-modes" aria-label={STRINGS.modes.title}>
            <ModeChips session={session} />
          </section>
        )}
        {state.clusters.map(one => (
          <ClusterCard key={one.name} cluster={one} several={several} disabled={busy} actions={this._actions} />
        ))}
        {state.clusters.length === 0 && this._startForm(session, busy)}
        {state.clusters.length > 0 && state.panels.length > 0 && (
          <Panels names={state.panels} of={several ? current(state)?.name : undefined} actions={this._actions} />
        )}
      </>
    );
  }

  private readonly _sessions: KernelSessions;
  private readonly _actions: Actions;
}

/** The buttons that open panels. `of` names the cluster where there are several. */
function Panels({ names, of, actions }: { names: string[]; of: string | undefined; actions: Actions }): React.JSX.Element {
  const words = STRINGS.panels;
  const title = of === undefined ? words.title : words.titleOf(of);
  const button = (name: string, label: string, title: string, first = '') => (
    <button key={name} className={`rbx-button ${first}`} onClick={() => void actions.openPanel(name)} title={title}>
      {label}
    </button>
  );
  return (
    <section className="rbx-panels" aria-label={title}>
      <h3>{title}</h3>
      <div>
        {button(DASHBOARD, words.dashboard, words.dashboardTip, 'rbx-first')}
        {names.map(name => button(name, name, words.tip(name)))}
      </div>
    </section>
  );
}

/** The running actions and the session's notice; screen readers announce both. */
function News({ session }: { session: KernelSession | null }): React.JSX.Element {
  const doing = session?.doing ?? [];
  const notice = session?.notice;
  return (
    <div className="rbx-news">
      <div role="status" className="rbx-doing">
        {doing.map(text => (
          <Progress key={text} text={text} />
        ))}
        {!notice?.isError && notice?.text}
      </div>
      <div role="alert" className="rbx-bad">
        {notice?.isError && notice.text}
      </div>
    </div>
  );
}
