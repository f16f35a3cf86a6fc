// The card of one cluster in the sidebar: its workers, and the buttons for the whole cluster.
// The card shows the state that it is given and keeps none of its own.

import { addIcon, closeIcon } from '@jupyterlab/ui-components';
import React from 'react';

import type { Actions } from './actions';
import { IconButton } from './button';
import { fewerIcon } from './icons';
import { STRINGS, type Cluster } from './strings';
import { WorkerRow } from './worker';

export interface ClusterProps {
  cluster: Cluster;
  /** Whether the notebook has other clusters, too. */
  several: boolean;
  /** Whether an action runs already. */
  disabled: boolean;
  actions: Actions;
}

export function ClusterCard({ cluster, several, disabled, actions }: ClusterProps): React.JSX.Element {
  const { name, kind, workers } = cluster;
  const words = STRINGS.cluster;
  return (
    <section className="rbx-cluster" aria-label={words.label(name)}>
      <header>
        <div className="rbx-text">
          <h3>{name}</h3>
          <span className="rbx-about">{words.about(workers.length, kind)}</span>
          {several && cluster.current && <span className="rbx-about">{words.current}</span>}
        </div>
        {several && !cluster.current && (
          <button className="rbx-button" disabled={disabled} onClick={() => void actions.use(cluster)}>
            {words.use}
          </button>
        )}
        <IconButton
          icon={fewerIcon}
          label={words.fewer(name)}
          disabled={disabled || workers.length < 2}
          onClick={() => void actions.scale(cluster, workers.length - 1)}
        />
        <IconButton
          icon={addIcon}
          label={words.more(name)}
          disabled={disabled}
          onClick={() => void actions.scale(cluster, workers.length + 1)}
        />
        <IconButton icon={closeIcon} label={words.stop(name)} disabled={disabled} onClick={() => void actions.stop(cluster)} />
      </header>
      <ul>
        {workers.map(worker => (
          <WorkerRow key={worker.name} worker={worker} cluster={cluster} disabled={disabled} actions={actions} />
        ))}
      </ul>
    </section>
  );
}
