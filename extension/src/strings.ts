// The messages between the page and a kernel, as types, and all texts that the extension shows, as one table.
// `rpcbench/notebook/sidebar.py` defines the same messages: field names and values must be equal in both files.
// Panels have a table of their own, `rpcbench/panels/strings.js`. States of workers: ready, busy, starting, stopped, lost.

/** The version of the messages. If the kernel has another one, the page shows an error and ignores the kernel's state. */
export const PROTOCOL_VERSION = 4;

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
  /** Of these, those that wait for a message that `%%step` holds; a kernel with an earlier version does not say it. */
  held?: number;
  /** The values of this worker that RRefs of the notebook refer to. */
  rrefs?: number;
}

export interface Cluster {
  name: string;
  /** Another cluster that is started under this name has another number. */
  number: number;
  kind: string;
  /** Whether magics that name no cluster use this one. */
  current: boolean;
  workers: Worker[];
}

/** What stays on until somebody ends it: faults, held messages, a recording, `%autoremote`. */
export interface Mode {
  name: 'chaos' | 'held' | 'record' | 'autoremote';
  /** What it is, in a few words: `drop 30 %, delay 0–50 ms`. */
  text: string;
  /** The request that ends it. */
  end: ModeEnd;
}

export interface ModeEnd {
  do: 'end';
  mode: Mode['name'];
  /** The cluster; empty for modes of the notebook. */
  of: string;
}

export interface State {
  /** The kernel's `PROTOCOL_VERSION`. */
  speaks: number;
  clusters: Cluster[];
  /** The targets of `%autoremote`; empty if cells without `%%remote` run in the notebook. */
  auto: string;
  /** The modes that are on. */
  modes: Mode[];
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
  | { do: 'start'; size: number; name?: string }
  | { do: 'act'; of: string; action: ClusterAction; target: string }
  | { do: 'use'; of: string }
  | ModeEnd
  | { do: 'stay'; watch: string };

/** Return the current cluster: the one whose workers a cell's first line can name. */
export function current(state: State | null): Cluster | undefined {
  return state?.clusters.find(cluster => cluster.current);
}

/** How many workers are proposed where none have run yet. */
export const FIRST_SIZE = 2;

export function count(size: number): string {
  return `${size} worker${size === 1 ? '' : 's'}`;
}

/** The board of several panels in one tab. */
/** Return a time of day, given in seconds since 1970, of 24 hours as panels have it. */
export function clockTime(seconds: number): string {
  const at = new Date(1000 * seconds);
  return [at.getHours(), at.getMinutes()].map(part => String(part).padStart(2, '0')).join(':');
}

export const DASHBOARD = 'dashboard';

/** What is lost with workers, as far as the kernel knows without asking them. */
const among = (values: number) => (values ? `, also the value${values === 1 ? '' : 's'} of ${values} RRef${values === 1 ? '' : 's'} here` : '');

const LOAD = '%load_ext rpcbench';

export const STRINGS = {
  product: 'rpcbench',
  workers: 'Workers',
  sidebar: 'rpcbench: workers',
  runsOn: 'Runs on',
  noNotebook: 'Open a notebook to start workers for it.',
  noKernel: 'This notebook has no Python kernel.',
  late: (seconds: number) => `Up to ${seconds} s old: messages of the kernel arrive late.`,
  waitsForKernel: 'Waiting for the kernel. If it runs a cell, it answers when that has ended.',
  noConnection: 'The connection to the kernel is lost. The page keeps trying to reach it.',
  loading: `Loading rpcbench in the kernel (${LOAD}), after any cell that runs…`,
  notLoaded: 'rpcbench is no longer loaded in this kernel.',
  kernelGone: 'The kernel is gone.',
  otherVersion: 'This kernel and this page have different versions of rpcbench: install the same version for both.',
  loadFailed: (why: string) => `${LOAD} failed in this notebook's kernel: ${why}`,
  interrupted: 'it was interrupted',

  start: {
    button: (size?: number) => (size ? `Start ${count(size)}` : 'Start'),
    cellRuns: 'A cell runs. Workers that it starts are shown here when it has ended.',
    busy: 'The kernel runs a cell and has not loaded rpcbench. Workers can be started when the cell has ended.',
    doing: (size: number) => `Starting ${count(size)}…`,
    /** Text between backticks is shown as code. */
    loads: `Runs \`${LOAD}\` in this notebook's kernel first.`,
    same: (size: number) => `The same as \`%cluster start ${size}\`.`
  },
  cluster: {
    label: (name: string) => `Cluster ${name}`,
    about: (size: number, kind: string) => [count(size), ...(kind === 'process' ? [] : [kind])].join(', '),
    current: 'current',
    use: 'use',
    fewer: (name: string) => `One fewer worker for ${name}`,
    more: (name: string) => `One more worker for ${name}`,
    stop: (name: string) => `Stop ${name}`,
    doing: {
      scale: (size: string) => `Changing to ${count(Number(size))}…`,
      restart: (name: string) => `Starting ${name} again…`,
      interrupt: (name: string) => `Interrupting ${name}…`,
      stop: () => 'Stopping…'
    }
  },
  worker: {
    drag: (name: string) => `Drag ${name} to a cell to run the cell there`,
    target: (name: string) => `Let the active cell run on ${name}`,
    interrupt: (name: string) => `Interrupt ${name}`,
    restart: (name: string) => `Restart ${name}`,
    startAgain: (name: string) => `Start ${name} again`,
    lost: (why: string) => `lost: ${why}`,
    suspended: 'suspended',
    held: (calls: number) => `${calls} call${calls === 1 ? '' : 's'} held`,
    started: (times: number) => `started ${times === 2 ? 'twice' : `${times} times`}`,
    drop: (name: string) => `runs on ${name}`
  },
  picker: {
    title:
      "Where this cell runs: its first line, %%remote. Options on that line stay when the target changes; 'notebook' " +
      'removes the line (undo brings it back).',
    notebook: 'notebook',
    auto: (targets: string) => `${targets} (%autoremote)`,
    lost: (name: string) => `${name} (lost)`,
    none: '(no target yet)'
  },
  ask: {
    start: 'Start workers',
    scale: 'How many workers should there be?',
    restart: 'Restart a worker',
    panel: 'Open a panel',
    target: 'Run this cell on',
    noCell: 'Choose a code cell first: only code cells have a target.',
    restartOne: (name: string) => `Restart ${name}?`,
    stillRuns: (name: string, values: number) =>
      `${name} is still running. Everything it holds will be lost${among(values)}.`,
    stop: (size: number) => `Stop ${count(size)}?`,
    lose: (values: number) => `Everything its workers hold will be lost${among(values)}.`,
    end: (names: string) => `End ${names}?`,
    loseThem: (size: number, values = 0) =>
      `Everything ${size === 1 ? 'it holds' : 'they hold'} will be lost${among(values)}.`,
    confirm: { restart: 'Restart', stop: 'Stop', end: 'End' }
  },
  commands: {
    start: 'Start Workers…',
    scale: 'Change the Number of Workers…',
    restart: 'Restart a Worker…',
    interrupt: 'Interrupt All Workers',
    stop: 'Stop All Workers…',
    dashboard: 'Open the Dashboard',
    panel: 'Open a Panel…',
    target: 'Run This Cell on…',
    sidebar: 'Show the Sidebar',
    startPage: 'Start Page',
    notebook: 'New rpcbench Notebook'
  },
  modes: {
    title: 'On now',
    end: (text: string) => `End: ${text}`,
    endTip: (text: string, magic: string) => `${text}. A click ends it, as ${magic} does.`,
    /** The magic, or the button of the step panel, that ends it, too. */
    magic: { chaos: '%chaos off', record: '%record stop', autoremote: '%autoremote off', held: 'Release all' }
  },
  status: {
    title: 'Show the workers in the sidebar',
    waits: 'rpcbench: waiting for the kernel…',
    text: (size: number, lost: number) =>
      `rpcbench: ${size ? count(size) : 'no workers'}${lost ? `, ${lost} lost` : ''}`,
    late: (seconds: number) => ` (up to ${seconds} s old)`
  },
  panels: {
    title: 'Panels',
    titleOf: (cluster: string) => `Panels of ${cluster}`,
    dashboard: 'Dashboard',
    dashboardTip: 'Workers, pipeline, progress, autograd and messages as one board',
    tip: (name: string) => `Open the panel ${name} in a tab`,
    /** `cluster` is empty where the notebook has one. */
    tab: (name: string, notebook: string, cluster: string) => `${name}${cluster ? ` of ${cluster}` : ''}: ${notebook}`,
    /** The tooltip of a tab; `cluster` is empty while none runs. */
    caption: (name: string, path: string, cluster: string) =>
      `The panel ${name} of ${path}${cluster ? `, cluster ${cluster}` : ''}`,
    other: (notebook: string) => `of another notebook: ${notebook}`,
    owner: (notebook: string) => `These are the panels of ${notebook}. A click shows it.`,
    loading: (name: string) => `Loading ${name}…`,
    note: 'About this tab',
    waitsForNotebook: (path: string) => `Waiting for ${path}…`,
    notebookClosed: (path: string) => `${path} is not open.`,
    noKernel: (path: string) => `${path} has no Python kernel now.`,
    none: (path: string) => `No workers run in ${path}.`,
    stopped: 'The workers are stopped. This is the last picture.',
    gone: (cluster: string, isDrawn: boolean) => `The cluster ${cluster} has ended.${isDrawn ? ' This is its last picture.' : ''}`,
    showOther: (cluster: string) => `Show ${cluster}`,
    open: 'Open the notebook',
    close: 'Close this tab',
    picture: (time: string) => `This is the last picture, of ${time}.`,
    showLive: 'Show live'
  },
  startPage: {
    tab: 'rpcbench',
    title: 'rpcbench',
    about: 'Distributed PyTorch in notebooks: cells on workers, RPC, distributed autograd and pipelines you can watch.',
    startHere: 'Start here',
    newTitle: 'New rpcbench notebook',
    newAbout: 'An empty notebook whose first cell starts two workers.',
    newCaption: 'A notebook whose first cell starts two workers',
    caption: 'Lessons, and a new notebook with two workers',
    tracks: { start: 'Start', rpc: 'RPC and autograd', scale: 'Training at scale', exam: 'Exam', appendix: 'Appendix' },
    minutes: (count: number) => `${count} min`,
    solved: (solved: number, all: number) =>
      solved >= all ? `✓ all ${all} exercises solved` : `${solved} of ${all} exercises solved`,
    noLessons: 'There are no lessons in this folder. “rpcbench lessons”, in a terminal, copies them to a new one.',
    waits: 'Looking for lessons…'
  }
};

/** The cells of a new rpcbench notebook. */
export const FIRST_CELLS = [`${LOAD}\n%cluster start ${FIRST_SIZE}`, ''];
