// A tab with live panels of one notebook: one panel, or several as a board.
// The kernel creates the widgets and sends their MIME bundles. The notebook's own renderers draw them, as only they know the
// widgets of that kernel.
// Guarantees: the tab closes with its notebook, and the kernel closes the panels when the tab closes. While no workers run, the
// tab says so, offers to start some, and keeps the last picture; it asks for its panels again once workers run.

import { MainAreaWidget } from '@jupyterlab/apputils';
import type { IMimeBundle } from '@jupyterlab/nbformat';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { OutputAreaModel, SimplifiedOutputArea } from '@jupyterlab/outputarea';
import { UUID } from '@lumino/coreutils';
import { Panel, Widget } from '@lumino/widgets';

import { KernelComm } from './comm';
import { rpcbenchIcon } from './icons';
import type { KernelSession } from './session';
import type { KernelSessions } from './sessions';
import { current, DASHBOARD, STRINGS } from './strings';
import { TabNote } from './tabNote';

const BOARD = ['workers', 'pipeline', 'autograd', 'messages'];

export class PanelTab extends MainAreaWidget<Panel> {
  /** `name` is a panel's, or `DASHBOARD`; `path` is the notebook's, which may be opened later. */
  constructor(readonly name: string, path: string, sessions: KernelSessions, openNotebook: (path: string) => void) {
    super({ content: new Panel() });
    this._path = path;
    this._sessions = sessions;
    this.id = `rpcbench-panel-${UUID.uuid4()}`;
    this.addClass('rbx-tab');
    this.toolbar.hide();
    this.title.icon = rpcbenchIcon;
    this.title.closable = true;
    this.content.addClass('rbx-board');
    this.content.toggleClass('rbx-dashboard', name === DASHBOARD);
    this.content.addWidget(this._note = new TabNote(this, openNotebook));
    this._parts = (name === DASHBOARD ? BOARD : [name]).map(one => new Part(one));
    this._parts.forEach(part => this.content.addWidget(part));
    this._drawTitle();
    sessions.opened.connect(this._connect, this);
    this._connect();
  }

  /** Whether the page has restored the notebooks that were open before it was reloaded. */
  get isRestored(): boolean {
    return this._isRestored;
  }

  set isRestored(value: boolean) {
    this._isRestored = value;
    this._note.update();
  }

  /** The notebook, and its session, once it is open. */
  get notebook(): NotebookPanel | null {
    return this._notebook;
  }

  get session(): KernelSession | null {
    return this._notebook && this._sessions.forPanel(this._notebook);
  }

  get path(): string {
    return this._notebook?.context.path ?? this._path;
  }

  /** Whether it shows a picture, be it the last one. */
  get isDrawn(): boolean {
    return this._parts.some(part => part.isDrawn);
  }

  private _connect(): void {
    const notebook = this._sessions.find(this._path);
    if (notebook && !this._notebook) {
      this._notebook = notebook;
      this._sessions.opened.disconnect(this._connect, this);
      this._sessions.forPanel(notebook).changed.connect(this._refresh, this);
      notebook.disposed.connect(this.dispose, this);
      notebook.context.pathChanged.connect(this._drawTitle, this);
    }
    this._refresh();
  }

  private _drawTitle(): void {
    this.title.label = STRINGS.panels.tab(this.name, this.path.split('/').at(-1) ?? '');
    this.title.caption = STRINGS.panels.caption(this.name, this.path);
  }

  /** Ask for panels of the current cluster, and again once that one is gone and another one runs. */
  private _refresh(): void {
    const { session, notebook } = this;
    const state = session?.state ?? null;
    const hasEnded = session?.phase === 'none' || session?.phase === 'absent';
    if (hasEnded || (state && !state.clusters.some(({ number }) => number === this._cluster))) {
      this._cluster = current(state)?.number;
      this._parts.forEach(part => part.expire());
    }
    if (session && notebook && this._cluster !== undefined && state) {
      this._parts.forEach(part => part.ask(session, notebook));
    }
    this._note.update();
  }

  private readonly _path: string;
  private readonly _sessions: KernelSessions;
  private readonly _note: TabNote;
  private readonly _parts: Part[];
  private _notebook: NotebookPanel | null = null;
  private _cluster: number | undefined; // the number of the one that the panels are of
  private _isRestored = false;
}

/** The place of one panel. */
export class Part extends Panel {
  constructor(name: string) {
    super();
    this._name = name;
    this.addClass('rbx-part');
    this.node.dataset['panel'] = name;
  }

  get isDrawn(): boolean {
    return this._output !== null;
  }

  /** Ask the kernel for the panel, unless it has been asked since the last `expire`. */
  ask(session: KernelSession, notebook: NotebookPanel): void {
    if (!this._isExpired || !session.kernel) {
      return;
    }
    this._isExpired = false;
    this._comm?.close();
    this._comm = new KernelComm(session.kernel, {
      isPanel: true,
      onMessage: data => this._draw(notebook, data['bundle'] as IMimeBundle),
      onEnd: data => this._onEnd(data)
    });
    void this._comm.open({ do: 'panel', name: this._name });
  }

  /** Ask again at the next opportunity; until then the picture stays. */
  expire(): void {
    this._isExpired = true;
  }

  override dispose(): void {
    this._comm?.close();
    this._comm = null;
    super.dispose();
  }

  private _draw(notebook: NotebookPanel, bundle: IMimeBundle): void {
    const model = new OutputAreaModel({ trusted: true });
    this._put(new SimplifiedOutputArea({ model, rendermime: notebook.content.rendermime }));
    model.add({ output_type: 'display_data', data: bundle, metadata: {} });
  }

  private _onEnd({ error, gone }: { error?: unknown; gone?: unknown }): void {
    this._comm = null;
    if (typeof error === 'string' && !gone) {
      const text = document.createElement('p');
      text.className = 'rbx-bad';
      text.setAttribute('role', 'alert');
      text.textContent = `${this._name}: ${error}`;
      this._put(new Widget({ node: text }));
    } else {
      this.expire();
    }
  }

  private _put(output: Widget): void {
    this._output?.dispose();
    this._output = output;
    this.addWidget(output);
  }

  private readonly _name: string;
  private _comm: KernelComm | null = null;
  private _output: Widget | null = null;
  private _isExpired = true;
}
