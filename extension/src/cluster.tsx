// The card of one cluster in the sidebar: its workers, and the buttons for the whole cluster.
// The card shows the state that it is given and keeps none of its own.

import { addIcon, closeIcon } from '@jupyterlab/ui-components';
import React from 'react';

import type { Actions } from './actions';
import { IconButton } from './button';
import { fewerIcon } from './icons';
import { count, type Cluster } from './strings';
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
  const about = [count(workers.length), ...(kind === 'process' ? [] : [kind])].join(', ');
  return (
    <section className="rb-cluster" aria-label={`Cluster ${name}`}>
      <header>
        <h3>{name}</h3>
        <span className="rb-about">{about}</span>
        {several && cluster.current && <span className="rb-about">current</span>}
        {several && !cluster.current && (
          <button className="rb-button" disabled={disabled} onClick={() => void actions.use(cluster)}>
            use
          </button>
        )}
        <span className="rb-space" />
        <IconButton
          icon={fewerIcon}
          label={`One fewer worker for ${name}`}
          disabled={disabled || workers.length < 2}
          onClick={() => void actions.scale(cluster, workers.length - 1)}
        />
        <IconButton
          icon={addIcon}
          label={`One more worker for ${name}`}
          disabled={disabled}
          onClick={() => void actions.scale(cluster, workers.length + 1)}
        />
        <IconButton icon={closeIcon} label={`Stop ${name}`} disabled={disabled} onClick={() => void actions.stop(cluster)} />
      </header>
      <ul>
        {workers.map(worker => (
          <WorkerRow key={worker.name} worker={worker} cluster={cluster} disabled={disabled} actions={actions} />
        ))}
      </ul>
    </section>
  );
}
