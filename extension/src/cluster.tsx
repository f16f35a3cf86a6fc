// One cluster: its workers, and what can be done to all of them.

import { addIcon, closeIcon } from '@jupyterlab/ui-components';
import React from 'react';

import { IconButton } from './button';
import type { Deeds } from './deeds';
import { fewerIcon } from './icons';
import { WorkerRow } from './worker';
import { count, type Cluster } from './words';

export interface ClusterProps {
  cluster: Cluster;
  /** Whether there are others. */
  several: boolean;
  /** Whether something is being done already. */
  disabled: boolean;
  deeds: Deeds;
}

export function ClusterCard({ cluster, several, disabled, deeds }: ClusterProps): React.JSX.Element {
  const { name, kind, workers } = cluster;
  const about = [count(workers.length), ...(kind === 'process' ? [] : [kind])].join(', ');
  return (
    <section className="rb-cluster" aria-label={`Cluster ${name}`}>
      <header>
        <h3>{name}</h3>
        <span className="rb-about">{about}</span>
        {several && cluster.current && <span className="rb-about">current</span>}
        {several && !cluster.current && (
          <button className="rb-button" disabled={disabled} onClick={() => void deeds.use(cluster)}>
            use
          </button>
        )}
        <span className="rb-space" />
        <IconButton
          icon={fewerIcon}
          label={`One worker less for ${name}`}
          disabled={disabled || workers.length < 2}
          onClick={() => void deeds.scale(cluster, workers.length - 1)}
        />
        <IconButton
          icon={addIcon}
          label={`One more worker for ${name}`}
          disabled={disabled}
          onClick={() => void deeds.scale(cluster, workers.length + 1)}
        />
        <IconButton icon={closeIcon} label={`Stop ${name}`} disabled={disabled} onClick={() => void deeds.stop(cluster)} />
      </header>
      <ul>
        {workers.map(worker => (
          <WorkerRow key={worker.name} worker={worker} cluster={cluster} disabled={disabled} deeds={deeds} />
        ))}
      </ul>
    </section>
  );
}
