// A tab with live panels of one cluster of a notebook: one panel, or several as a board.
// Guarantees: the tab closes with its notebook, and the kernel closes the panels when the tab closes. While no workers run, the
// tab says so, offers to start some, and keeps the last picture. It is of the cluster for which it was opened, by its name: it asks
// for its panels again once one of that name runs, and where others run it says that its own has ended. The tab's title begins
// with the panel's name, names the cluster where there are several, and has a mark while another notebook is in front; the tab
// names its notebook if others have one.
// A panel of its own may be as high as its tab, and scrolls only beyond that; the board's panels are all in sight.

import { MainAreaWidget } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { UUID } from '@lumino/coreutils';
import type { Message } from '@lumino/messaging';
import { Panel, Widget } from '@lumino/widgets';

import { rpcbenchIcon } from './icons';
import { Part } from './part';
import type { KernelSession } from './session';
import type { KernelSessions } from './sessions';
import { current, DASHBOARD, STRINGS } from './strings';
import { TabNote } from './tabNote';

// The first screen of a narrow tab has two of them, and the head of a third one.
const BOARD = ['workers', 'pipeline', 'progress', 'autograd', 'messages'];

const GAP = 8; // pixels below a panel, as in index.css
const LEAST_ROOM = 260; // for a panel; a lower tab scrolls

const scrollTitles = ({ currentTarget, deltaY }: WheelEvent) => (currentTarget as Element).scrollBy({ left: deltaY });

export class PanelTab extends MainAreaWidget<Panel> {
  /**
   * `name` is a panel's, or `DASHBOARD`; `path` is the notebook's, which may be opened later. `cluster` is a cluster's name; where
   * it is empty the tab takes the current one, once there is one.
   */
  constructor(
    readonly name: string, path: string, cluster: string, sessions: KernelSessions, openNotebook: (path: string) => void
  ) {
    super({ content: new Panel() });
    this._path = path;
    this._cluster = cluster;
    this._sessions = sessions;
    this.id = `rpcbench-panel-${UUID.uuid4()}`;
    this.addClass('rbx-tab');
    this.toolbar.hide();
    this.title.icon = rpcbenchIcon;
    this.title.closable = true;
    this.content.addClass('rbx-board');
    this.content.toggleClass('rbx-dashboard', name === DASHBOARD);
    this._owner.className = 'rbx-owner';
    this._owner.hidden = true;
    this._owner.addEventListener('click', () => openNotebook(this.path));
    this.content.addWidget(new Widget({ node: this._owner }));
    this.content.addWidget(this._note = new TabNote(this, openNotebook));
    this._parts = (name === DASHBOARD ? BOARD : [name]).map(one => new Part(one));
    this._parts.forEach(part => this.content.addWidget(part));
    if (name !== DASHBOARD) {
      [this.content.node, this._owner, this._note.node].forEach(node => this._sizes.observe(node));
    }
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

  /** The name of the cluster; empty before there was one. */
  get cluster(): string {
    return this._cluster;
  }

  /** The name by which layouts know the tab: with that of the cluster where the notebook has several. */
  get key(): string {
    return this._isNamed ? `${this.name}/${this._cluster}` : this.name;
  }

  /** Whether others of the notebook's clusters run, and not this one. */
  get isGone(): boolean {
    const clusters = this.session?.state?.clusters ?? [];
    return this._cluster !== '' && clusters.length > 0 && !clusters.some(({ name }) => name === this._cluster);
  }

  /** Show the panels of another cluster from now on. */
  showCluster(name: string): void {
    this._cluster = name;
    this._refresh();
  }

  /** Whether it shows a picture, be it the last one. */
  get isDrawn(): boolean {
    return this._parts.some(part => part.isDrawn);
  }

  /** Mark a tab whose notebook is not in front, and say whose it is if notebooks `share` the page. */
  mark(isOther: boolean, share: boolean): void {
    this._isOther = isOther;
    this._owner.hidden = !share;
    this._drawTitle();
  }

  /** Have the title in sight, where the bar of titles has no room for all of them. */
  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    requestAnimationFrame(() => { // the bar draws new titles first
      const title = document.querySelector(`.rbx-tab-title[data-id="${this.id}"]`);
      title?.scrollIntoView({ block: 'nearest', inline: 'nearest' });
      title?.parentElement?.addEventListener('wheel', scrollTitles, { passive: true });
    });
  }

  override dispose(): void {
    this._sizes.disconnect();
    super.dispose();
  }

  /** Tell the styles how high a panel can be without a scroll bar of the tab. */
  private _measure(): void {
    const { node } = this.content;
    const part = this._parts[0]!.node;
    const top = part.getBoundingClientRect().top - node.getBoundingClientRect().top + node.scrollTop;
    const room = Math.floor(node.clientHeight - top - GAP);
    if (node.clientHeight) {
      node.style.setProperty('--rbx-room', `${Math.max(LEAST_ROOM, room)}px`);
    }
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
    const words = STRINGS.panels;
    const file = PathExt.basename(this.path);
    const cluster = this._number === undefined ? '' : this._cluster;
    const caption = [words.caption(this.name, this.path, cluster), ...(this._isOther ? [words.other(file)] : [])];
    this.title.label = words.tab(this.name, PathExt.basename(file, PathExt.extname(file)), this._isNamed ? this._cluster : '');
    this.title.caption = caption.join('\n');
    this.title.className = this._isOther ? 'rbx-tab-title rbx-other' : 'rbx-tab-title';
    this._owner.textContent = file;
    this._owner.title = words.owner(this.path);
  }

  /** Ask for the panels of the tab's cluster, and again once that one has ended and another one has its name. */
  private _refresh(): void {
    const { session, notebook } = this;
    const state = session?.state ?? null;
    const hasEnded = session?.phase === 'none' || session?.phase === 'absent';
    if (state) {
      this._cluster ||= current(state)?.name ?? '';
    }
    const number = state?.clusters.find(({ name }) => name === this._cluster)?.number;
    if (hasEnded || (state && number !== this._number)) {
      this._number = number;
      this._parts.forEach(part => part.expire());
    }
    this._isNamed ||= (state?.clusters.length ?? 0) > 1 || this.isGone;
    if (session && notebook && number !== undefined) {
      this._parts.forEach(part => part.ask(session, notebook, this._cluster));
    }
    this._drawTitle();
    this._note.update();
  }

  private readonly _path: string;
  private readonly _sessions: KernelSessions;
  private readonly _owner = document.createElement('button');
  private readonly _note: TabNote;
  private readonly _parts: Part[];
  private readonly _sizes = new ResizeObserver(() => this._measure());
  private _notebook: NotebookPanel | null = null;
  private _cluster: string;
  private _number: number | undefined; // of the cluster that has the name now; another one has another number
  private _isNamed = false; // the notebook has had several clusters
  private _isRestored = false;
  private _isOther = false;
}
