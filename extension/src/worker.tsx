// The row of one worker in the sidebar: its state, as a shape, a colour and a word, and its buttons.
// A worker of the current cluster that is not lost can be dragged to a cell, and can become the target of the active cell.

import { refreshIcon, stopIcon, undoIcon } from '@jupyterlab/ui-components';
import React from 'react';

import type { Actions } from './actions';
import { IconButton } from './button';
import { startDrag } from './drag';
import type { Cluster, Worker, WorkerState } from './strings';

export interface WorkerProps {
  worker: Worker;
  cluster: Cluster;
  disabled: boolean;
  actions: Actions;
}

export function WorkerRow({ worker, cluster, disabled, actions }: WorkerProps): React.JSX.Element {
  const { name, state } = worker;
  const lost = state === 'lost';
  return (
    <li
      className={`rb-worker rb-${state}`}
      data-worker={name}
      draggable={cluster.current && !lost}
      onDragStart={event => startDrag(event.dataTransfer, name)}
      title={cluster.current && !lost ? `Drag ${name} to a cell to run the cell there` : undefined}
    >
      <Mark state={state} />
      <span className="rb-name">{name}</span>
      <span className="rb-about">{describe(worker)}</span>
      <span className="rb-space" />
      {cluster.current && !lost && (
        <IconButton icon={undoIcon} label={`Let the active cell run on ${name}`} onClick={() => void actions.setTarget(name)} flip />
      )}
      {!lost && (
        <IconButton icon={stopIcon} label={`Interrupt ${name}`} onClick={() => void actions.interrupt(cluster, name)} />
      )}
      <IconButton
        icon={refreshIcon}
        label={lost ? `Start ${name} again` : `Restart ${name}`}
        disabled={disabled}
        onClick={() => void actions.restart(cluster, worker)}
      />
    </li>
  );
}

function describe({ state, note, start, cpu }: Worker): string {
  const again = start > 1 ? [`start ${start}`] : [];
  const load = cpu > 0 ? [`${cpu} %`] : [];
  return (note ? [`lost: ${note}`] : [state, ...load, ...again]).join(' · ');
}

const SHAPES: Record<WorkerState, React.JSX.Element> = {
  ready: <circle cx="6" cy="6" r="4.5" />,
  busy: <path d="M2 1.5 10.5 6 2 10.5Z" />,
  starting: <circle cx="6" cy="6" r="4" className="rb-hollow" />,
  stopped: <path d="M2 1.5h3v9H2zM7 1.5h3v9H7z" />,
  lost: <path d="M2 2 10 10M10 2 2 10" className="rb-hollow" />
};

function Mark({ state }: { state: WorkerState }): React.JSX.Element {
  return (
    <svg className="rb-mark" viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">
      {SHAPES[state]}
    </svg>
  );
}
