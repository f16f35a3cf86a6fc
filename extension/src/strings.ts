// The messages between the page and a kernel, as types, and the texts that several files show.
// `rpcbench/notebook/sidebar.py` defines the same messages: field names and values must be equal in both files.

/** The version of the messages. If the kernel has another one, the page shows an error and ignores the kernel's state. */
export const PROTOCOL_VERSION = 2;

export type WorkerState = 'ready' | 'busy' | 'starting' | 'stopped' | 'lost';

export interface Worker {
  name: string;
  state: WorkerState;
  /** The reason of the loss; empty while the worker is up. */
  note: string;
  /** The number of starts under this name: 1 at first, 2 after a restart. */
  start: number;
  /** Percent of one core. */
  cpu: number;
  /** The notebook's calls that wait for this worker. */
  calls: number;
}

export interface Cluster {
  name: string;
  kind: string;
  /** Whether magics that name no cluster use this one. */
  current: boolean;
  workers: Worker[];
}

export interface State {
  /** The kernel's `PROTOCOL_VERSION`. */
  speaks: number;
  clusters: Cluster[];
  /** The targets of `%autoremote`; empty if cells without `%%remote` run in the notebook. */
  auto: string;
  /** The running actions, with their progress. */
  doing: string[];
  /** The names of the panels that can be opened. */
  panels: string[];
}

/** The result of a request. It is empty if rpcbench is not loaded: the kernel then closes the comm without data. */
export interface Reply {
  text?: string;
  error?: string;
  /** For `stay`: whether the kernel still knows the watch. */
  there?: boolean;
}

/** An action on a cluster. The buttons of the workers panel start the same actions. */
export type ClusterAction = 'scale' | 'restart' | 'interrupt' | 'stop';

/** The target that means every worker. */
export const ALL = 'all';

/** A request with one reply. `target` is a worker, `ALL`, or for `scale` the new number of workers as text. */
export type KernelRequest =
  | { do: 'start'; size: number }
  | { do: 'act'; of: string; action: ClusterAction; target: string }
  | { do: 'use'; of: string }
  | { do: 'stay'; watch: string };

/** Return the current cluster: the one whose workers a cell's first line can name. */
export function current(state: State | null): Cluster | undefined {
  return state?.clusters.find(cluster => cluster.current);
}

export function count(size: number): string {
  return `${size} worker${size === 1 ? '' : 's'}`;
}
