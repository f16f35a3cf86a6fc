// What a kernel says of its clusters: the words of rpcbench/notebook/sidebar.py, in types.

/** The version of these words; a kernel that speaks another one is not guessed at. */
export const SPEAKS = 2;

export type WorkerState = 'ready' | 'busy' | 'starting' | 'stopped' | 'lost';

export interface Worker {
  name: string;
  state: WorkerState;
  /** How it was lost; empty while it serves. */
  note: string;
  /** 1 for the first of its name, 2 once it has been started again. */
  start: number;
  /** Per cent of a core. */
  cpu: number;
  /** Calls of the notebook that wait for it. */
  calls: number;
}

export interface Cluster {
  name: string;
  kind: string;
  /** Whether it is the one that all magics mean. */
  current: boolean;
  workers: Worker[];
}

export interface State {
  speaks: number;
  clusters: Cluster[];
  /** The targets of `%autoremote`; empty where cells without a first line of ours run in the notebook. */
  auto: string;
  /** What is being done, and how far it is. */
  doing: string[];
  /** Names of the panels that can be opened. */
  panels: string[];
}

/** What came of a deed. Neither: nobody heard, as rpcbench is not loaded. */
export interface Answer {
  text?: string;
  error?: string;
  there?: boolean;
}

/** What can be done to a cluster, by a button of a panel as well. */
export type Action = 'scale' | 'restart' | 'interrupt' | 'stop';

export const ALL = 'all';

/** What a page can ask for, once each. `target`: a worker, all, or for `scale` how many there shall be. */
export type Deed =
  | { do: 'start'; size: number }
  | { do: 'act'; of: string; action: Action; target: string }
  | { do: 'use'; of: string }
  | { do: 'stay'; watch: string };

/** What a cell can mean by its first line without naming a group: the current cluster. */
export function current(state: State | null): Cluster | undefined {
  return state?.clusters.find(cluster => cluster.current);
}

export function count(size: number): string {
  return `${size} worker${size === 1 ? '' : 's'}`;
}
