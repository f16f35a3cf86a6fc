// The user's actions, for the sidebar and the commands. An action without an argument asks the user to choose.
// Guarantees: an action that would lose data on a worker asks for confirmation first. The kernel does the work, and the
// session notifies the user of the result.

import { Dialog, InputDialog, showDialog } from '@jupyterlab/apputils';

import { dropTarget } from './dropTarget';
import type { KernelSessions } from './sessions';
import { ALL, current, DASHBOARD, FIRST_SIZE, STRINGS, type Cluster, type ClusterAction, type Worker } from './strings';
import type { PanelTabs } from './tabs';

const ASK = STRINGS.ask;
const NOTEBOOK = STRINGS.picker.notebook;

export class Actions {
  constructor(sessions: KernelSessions, tabs: PanelTabs) {
    this._sessions = sessions;
    this._tabs = tabs;
  }

  async start(size?: number): Promise<void> {
    const wanted = size ?? (await this._askNumber(ASK.start, this._sessions.current?.lastSize ?? FIRST_SIZE));
    if (wanted) {
      await this._sessions.current?.perform({ do: 'start', size: wanted }, STRINGS.start.doing(wanted));
    }
  }

  async scale(cluster = this._cluster, size?: number): Promise<void> {
    const wanted = cluster && (size ?? (await this._askNumber(ASK.scale, cluster.workers.length)));
    if (cluster && wanted && (await this._mayShrink(cluster, wanted))) {
      await this._act(cluster, 'scale', String(wanted));
    }
  }

  async restart(cluster = this._cluster, worker?: Worker): Promise<void> {
    const chosen = worker ?? (cluster && (await this._askWorker(cluster, ASK.restart)));
    if (!cluster || !chosen) {
      return;
    }
    const { name, state } = chosen;
    const body = ASK.stillRuns(name, valuesOn([chosen]));
    if (state === 'lost' || (await askToConfirm(ASK.restartOne(name), body, ASK.confirm.restart))) {
      await this._act(cluster, 'restart', name);
    }
  }

  async interrupt(cluster = this._cluster, worker = ALL): Promise<void> {
    if (cluster) {
      await this._act(cluster, 'interrupt', worker);
    }
  }

  async stop(cluster = this._cluster): Promise<void> {
    if (cluster && (await askToConfirm(ASK.stop(cluster.workers.length), ASK.lose(valuesOn(cluster.workers)), ASK.confirm.stop))) {
      await this._act(cluster, 'stop', ALL);
    }
  }

  async use(cluster: Cluster): Promise<void> {
    await this._sessions.current?.perform({ do: 'use', of: cluster.name });
  }

  /** Open a panel, or the dashboard, of the current notebook. */
  async openPanel(name?: string): Promise<void> {
    const { current: session, notebook } = this._sessions;
    const chosen = name ?? (await choose(ASK.panel, [DASHBOARD, ...(session?.state?.panels ?? [])]));
    if (notebook && chosen) {
      this._tabs.open(notebook, chosen);
    }
  }

  /** Set where the active cell runs: a worker, `all`, or `notebook` for the notebook's own kernel. */
  async setTarget(target?: string): Promise<void> {
    const { current: session, notebook } = this._sessions;
    if (notebook?.content.activeCell?.model.type !== 'code') {
      return session?.notify(ASK.noCell, true);
    }
    const names = this._cluster?.workers.map(worker => worker.name) ?? [];
    const chosen = target ?? (await choose(ASK.target, [NOTEBOOK, ...names, ALL]));
    if (chosen && !dropTarget(notebook.content.activeCell, chosen === NOTEBOOK ? null : chosen)) {
      session?.notify(ASK.noCell, true);
    }
  }

  private async _act(cluster: Cluster, action: ClusterAction, target: string): Promise<void> {
    const asked = STRINGS.cluster.doing[action](target);
    await this._sessions.current?.perform({ do: 'act', of: cluster.name, action, target }, asked);
  }

  private get _cluster(): Cluster | undefined {
    return current(this._sessions.current?.state ?? null);
  }

  private async _askNumber(title: string, value: number): Promise<number | null> {
    const result = await InputDialog.getNumber({ title, value, label: STRINGS.workers });
    return result.button.accept && result.value && result.value >= 1 ? Math.floor(result.value) : null;
  }

  private async _askWorker(cluster: Cluster, title: string): Promise<Worker | undefined> {
    const name = await choose(title, cluster.workers.map(worker => worker.name));
    return cluster.workers.find(worker => worker.name === name);
  }

  private async _mayShrink(cluster: Cluster, size: number): Promise<boolean> {
    const ended = cluster.workers.slice(size);
    const names = ended.map(({ name }) => name).join(', ');
    return !ended.length || askToConfirm(ASK.end(names), ASK.loseThem(ended.length, valuesOn(ended)), ASK.confirm.end);
  }

  private readonly _sessions: KernelSessions;
  private readonly _tabs: PanelTabs;
}

function valuesOn(workers: Worker[]): number {
  return workers.reduce((sum, { rrefs = 0 }) => sum + rrefs, 0);
}

async function askToConfirm(title: string, body: string, label: string): Promise<boolean> {
  const buttons = [Dialog.cancelButton(), Dialog.warnButton({ label })];
  return (await showDialog({ title, body, buttons })).button.accept;
}

/** Let the user choose an item. Return null if there are none, or if the user cancels. */
async function choose(title: string, items: string[]): Promise<string | null> {
  const result = items.length ? await InputDialog.getItem({ title, items, label: title }) : null;
  return result?.button.accept ? result.value : null;
}
