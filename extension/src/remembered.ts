// Remembers which panels stand beside each notebook, and where, in JupyterLab's settings: they outlast the page, its workspace and
// the server.
// Guarantees: a notebook that is opened has the panels that it had when it was closed, unless JupyterLab itself has restored some.
// Only a tab that the user closes while its notebook stays is forgotten. Other pages' entries are kept.

import type { ILabShell, JupyterFrontEnd } from '@jupyterlab/application';
import { PageConfig } from '@jupyterlab/coreutils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { JSONObject, PartialJSONValue } from '@lumino/coreutils';
import type { Widget } from '@lumino/widgets';

import { namesIn, NOTEBOOK, prune, type Area } from './layouts';
import type { KernelSessions } from './sessions';
import type { PanelTabs } from './tabs';

const SETTINGS = 'jupyter-rpcbench:layouts';
const KEY = 'notebooks';
const MOST_NOTEBOOKS = 200;
const SETTLE_MILLISECONDS = 500; // a notebook that closes with its tabs is gone by then

type Layouts = Record<string, Area<string>>;

export class RememberedPanels {
  constructor(
    app: JupyterFrontEnd, lab: ILabShell, registry: ISettingRegistry, sessions: KernelSessions, tabs: PanelTabs
  ) {
    this._lab = lab;
    this._registry = registry;
    this._tabs = tabs;
    const followed = (notebook: NotebookPanel) => void app.restored.then(async () => this._follow(notebook));
    sessions.opened.connect((_, notebook) => followed(notebook));
    sessions.all.forEach(followed);
    lab.layoutModified.connect(this._schedule, this);
  }

  /** Bring the notebook's panels back, and keep what becomes of them. */
  private async _follow(notebook: NotebookPanel): Promise<void> {
    const layouts = await this._read();
    await notebook.revealed;
    if (notebook.isDisposed) {
      return;
    }
    const layout = layouts[keyOf(notebook)];
    if (layout && notebook.isAttached && this._lab.mode === 'multiple-document' && !this._tabs.of(notebook).length) {
      this._tabs.bringBack(notebook, layout);
    }
    this._keys.set(notebook, keyOf(notebook));
    notebook.context.pathChanged.connect(this._schedule, this);
    notebook.disposed.connect(() => this._keys.delete(notebook));
    this._schedule();
  }

  private _schedule(): void {
    window.clearTimeout(this._timer);
    this._timer = window.setTimeout(() => (this._saving = this._saving.then(async () => this._save())), SETTLE_MILLISECONDS);
  }

  private async _save(): Promise<void> {
    const main = this._lab.saveLayout().mainArea?.dock?.main;
    if (!main || this._lab.mode !== 'multiple-document' || !this._keys.size) {
      return;
    }
    const layouts = await this._read();
    const before = JSON.stringify(layouts);
    for (const [notebook, key] of this._keys) {
      const layout = prune<Widget>(main, widget => (widget === notebook ? NOTEBOOK : this._tabs.keyOf(widget, notebook)));
      const names = layout ? namesIn(layout) : [];
      if (names.includes(NOTEBOOK)) {
        const now = keyOf(notebook);
        this._keys.set(notebook, now);
        if (key !== now || names.length < 2) {
          delete layouts[key];
        }
        if (layout && names.length > 1) {
          layouts[now] = layout;
        }
      }
    }
    if (JSON.stringify(layouts) !== before) {
      const last = Object.entries(layouts).slice(-MOST_NOTEBOOKS);
      await this._registry.set(SETTINGS, KEY, Object.fromEntries(last) as unknown as PartialJSONValue).catch(report);
    }
  }

  /** Read all entries from the server, as other pages write them, too. */
  private async _read(): Promise<Layouts> {
    try {
      const settings = await this._registry.reload(SETTINGS);
      return { ...((settings.get(KEY).composite ?? {}) as JSONObject as unknown as Layouts) };
    } catch (error) {
      report(error);
      return {};
    }
  }

  private readonly _lab: ILabShell;
  private readonly _registry: ISettingRegistry;
  private readonly _tabs: PanelTabs;
  private readonly _keys = new Map<NotebookPanel, string>(); // the notebooks that are followed
  private _timer = 0;
  private _saving = Promise.resolve();
}

/** Return the key of a notebook: its path, on the server's machine. */
function keyOf(notebook: NotebookPanel): string {
  return `${PageConfig.getOption('serverRoot')}/${notebook.context.path}`;
}

function report(error: unknown): void {
  console.debug('rpcbench: the places of panels could not be kept', error);
}
