// The sessions of all open notebooks, one each, and the current one, which the sidebar and the status bar show.
// Guarantees: a notebook has one session from the first use until the notebook is closed; the current session belongs to
// the notebook that the user looked at last.

import type { Cell } from '@jupyterlab/cells';
import { NotebookActions, type INotebookTracker, type NotebookPanel } from '@jupyterlab/notebook';
import { Signal, type ISignal } from '@lumino/signaling';

import { KernelSession } from './session';

export class KernelSessions {
  constructor(tracker: INotebookTracker) {
    this._tracker = tracker;
    tracker.currentChanged.connect(this._onCurrent, this);
    tracker.widgetAdded.connect((_, panel) => panel.disposed.connect(() => this.anyChanged.emit()));
    NotebookActions.executed.connect((_, { notebook, cell }) => {
      const panel = tracker.find(one => one.content === notebook);
      if (panel && cell.model.sharedModel.source.includes('rpcbench')) {
        this.forPanel(panel).recheck();
      }
    });
    this._onCurrent();
  }

  /** The current notebook, or something in its session, has changed. */
  readonly changed = new Signal<this, void>(this);

  /** The current notebook, or the session of any notebook, has changed, or a notebook has been closed. */
  readonly anyChanged = new Signal<this, void>(this);

  /** A notebook has been opened. */
  get opened(): ISignal<unknown, NotebookPanel> {
    return this._tracker.widgetAdded;
  }

  /** Return the open notebook at a path. */
  find(path: string): NotebookPanel | undefined {
    return this._tracker.find(one => one.context.path === path);
  }

  get notebook(): NotebookPanel | null {
    return this._tracker.currentWidget;
  }

  get current(): KernelSession | null {
    return this.notebook && this.forPanel(this.notebook);
  }

  /** The open notebooks. */
  get all(): NotebookPanel[] {
    return this._tracker.filter(() => true);
  }

  /** The open notebooks with a cluster. */
  get withClusters(): NotebookPanel[] {
    return this._tracker.filter(one => !one.isDisposed && Boolean(this._known.get(one)?.state?.clusters.length));
  }

  /** Return the notebook's session; make it at the first call. */
  forPanel(panel: NotebookPanel): KernelSession {
    const known = this._known.get(panel);
    if (known) {
      return known;
    }
    const session = new KernelSession(panel.sessionContext);
    this._known.set(panel, session);
    session.changed.connect(() => {
      if (session === this.current) {
        this.changed.emit();
      }
      this.anyChanged.emit();
    });
    panel.disposed.connect(() => session.dispose());
    return session;
  }

  /** Return the session of the notebook that contains the cell; null while no notebook contains it. */
  forCell(cell: Cell): KernelSession | null {
    const panel = this._tracker.find(one => one.content.widgets.includes(cell));
    return panel ? this.forPanel(panel) : null;
  }

  private _onCurrent(): void {
    this.changed.emit();
    this.anyChanged.emit();
  }

  private readonly _tracker: INotebookTracker;
  private readonly _known = new WeakMap<NotebookPanel, KernelSession>();
}
