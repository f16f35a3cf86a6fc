// The row of one worker in the sidebar: its state, as a shape, a colour and a word, and its buttons.
// A worker of the current cluster that is not lost can be dragged to a cell, and can become the target of the active cell.

import { refreshIcon, stopIcon, undoIcon } from '@jupyterlab/ui-components';
import React from 'react';

import type { Actions } from './actions';
import { IconButton } from './button';
import { startDrag } from './drag';
import { STRINGS, type Cluster, type Worker, type WorkerState } from './strings';

export interface WorkerProps {
  worker: Worker;
  cluster: Cluster;
  disabled: boolean;
  actions: Actions;
}

export function WorkerRow({ worker, cluster, disabled, actions }: WorkerProps): React.JSX.Element {
  const { name, state } = worker;
  const lost = state === 'lost';
  const words = STRINGS.worker;
  return (
    <li
      className={`rbx-worker rbx-${state}`}
      data-worker={name}
      draggable={cluster.current && !lost}
      onDragStart={event => startDrag(event.dataTransfer, name)}
      title={cluster.current && !lost ? words.drag(name) : undefined}
    >
      <Mark state={state} />
      <div className="rbx-text">
        <span className="rbx-now">
          <span className="rbx-name">{name}</span> <span className="rbx-about">{describe(worker)}</span>
        </span>
        {!lost && worker.start > 1 && <span className="rbx-about">{words.started(worker.start)}</span>}
      </div>
      {cluster.current && !lost && (
        <IconButton icon={undoIcon} label={words.target(name)} onClick={() => void actions.setTarget(name)} flip />
      )}
      {!lost && (
        <IconButton icon={stopIcon} label={words.interrupt(name)} onClick={() => void actions.interrupt(cluster, name)} />
      )}
      <IconButton
        icon={refreshIcon}
        label={lost ? words.startAgain(name) : words.restart(name)}
        disabled={disabled}
        onClick={() => void actions.restart(cluster, worker)}
      />
    </li>
  );
}

/** Return what changes by the second: in one line, so that the rows below stay where they are. */
function describe({ state, note, cpu, held }: Worker): string {
  // In the words of the workers panel: "stopped" is there that of a cluster that has ended.
  const parts = [state === 'stopped' ? STRINGS.worker.suspended : state, held ? STRINGS.worker.held(held) : '', cpu > 0 ? `${cpu} %` : ''];
  return note ? STRINGS.worker.lost(note) : parts.filter(Boolean).join(' · ');
}

const SHAPES: Record<WorkerState, React.JSX.Element> = {
  ready: <circle cx="6" cy="6" r="4.5" />,
  busy: <path d="M2 1.5 10.5 6 2 10.5Z" />,
  starting: <circle cx="6" cy="6" r="4" className="rbx-hollow" />,
  stopped: <path d="M2 1.5h3v9H2zM7 1.5h3v9H7z" />,
  lost: <path d="M2 2 10 10M10 2 2 10" className="rbx-hollow" />
};

function Mark({ state }: { state: WorkerState }): React.JSX.Element {
  return (
    <svg className="rbx-mark" viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">
      {SHAPES[state]}
    </svg>
  );
}
