// The sidebar: the clusters of the notebook that was looked at last, or how to start one.

import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import type { Bench } from './bench';
import type { Benches } from './benches';
import { ClusterCard } from './cluster';
import type { Deeds } from './deeds';
import { benchIcon } from './icons';
import { StartForm } from './start';

export class Sidebar extends ReactWidget {
  constructor(benches: Benches, deeds: Deeds) {
    super();
    this.id = 'rpcbench-sidebar';
    this.addClass('rb-sidebar');
    this.title.icon = benchIcon;
    this.title.caption = 'rpcbench: workers';
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', 'rpcbench: workers');
    this._benches = benches;
    this._deeds = deeds;
    benches.changed.connect(() => this.update());
  }

  protected override render(): React.JSX.Element {
    const bench = this._benches.current;
    const of = this._benches.notebook?.title.label;
    return (
      <>
        <header className="rb-head">
          <h2>Workers</h2>
          {of && <span className="rb-of">{of}</span>}
        </header>
        {bench ? this._body(bench) : <p className="rb-hint">Open a notebook to start workers for it.</p>}
        <News bench={bench} />
      </>
    );
  }

  private _body(bench: Bench): React.JSX.Element {
    switch (bench.phase) {
      case 'none':
        return <p className="rb-hint">This notebook has no Python kernel.</p>;
      case 'unknown':
        return <p className="rb-hint">Waiting for the kernel…</p>;
      case 'loading':
        return <p className="rb-hint">Running %load_ext rpcbench in the kernel, once the cell that runs has ended…</p>;
      case 'absent':
        return <StartForm loads={true} disabled={false} deeds={this._deeds} />;
      case 'here':
        return this._clusters(bench);
    }
  }

  private _clusters(bench: Bench): React.JSX.Element {
    const { state } = bench;
    if (!state) {
      return <p className="rb-hint">Waiting for the kernel…</p>;
    }
    const busy = state.doing.length > 0;
    const several = state.clusters.length > 1;
    return (
      <>
        {state.clusters.map(one => (
          <ClusterCard key={one.name} cluster={one} several={several} disabled={busy} deeds={this._deeds} />
        ))}
        {state.clusters.length === 0 && <StartForm loads={false} disabled={busy} deeds={this._deeds} />}
        {state.clusters.length > 0 && state.panels.length > 0 && <Panels names={state.panels} deeds={this._deeds} />}
      </>
    );
  }

  private readonly _benches: Benches;
  private readonly _deeds: Deeds;
}

function Panels({ names, deeds }: { names: string[]; deeds: Deeds }): React.JSX.Element {
  return (
    <section className="rb-panels" aria-label="Panels">
      <h3>Panels</h3>
      <div>
        {names.map(name => (
          <button key={name} className="rb-button" onClick={() => void deeds.openPanel(name)} title={`Open the panel ${name} in a tab`}>
            {name}
          </button>
        ))}
      </div>
    </section>
  );
}

/** What is being done, and what came of the last deed; read out by screen readers. */
function News({ bench }: { bench: Bench | null }): React.JSX.Element {
  const doing = bench?.state?.doing ?? [];
  const notice = bench?.notice;
  return (
    <div className="rb-news">
      <div role="status" className="rb-doing">
        {doing.join('\n')}
        {!notice?.bad && notice?.text}
      </div>
      <div role="alert" className="rb-bad">
        {notice?.bad && notice.text}
      </div>
    </div>
  );
}
