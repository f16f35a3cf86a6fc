// What a user can do, from the sidebar or by a command: ask first where something would be lost, choose where nothing
// was named, and then ask the kernel.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, InputDialog, showDialog } from '@jupyterlab/apputils';

import { aim } from './aim';
import type { Benches } from './benches';
import { openPanel } from './tabs';
import { ALL, count, current, type Action, type Cluster, type Worker } from './words';

export class Deeds {
  constructor(app: JupyterFrontEnd, benches: Benches) {
    this._app = app;
    this._benches = benches;
  }

  async start(size?: number): Promise<void> {
    const wanted = size ?? (await this._number('Start workers', 2));
    if (wanted) {
      await this._benches.current?.perform({ do: 'start', size: wanted });
    }
  }

  async scale(cluster = this._cluster, size?: number): Promise<void> {
    const wanted = cluster && (size ?? (await this._number('How many workers shall there be?', cluster.workers.length)));
    if (cluster && wanted && (await this._mayShrink(cluster, wanted))) {
      await this._act(cluster, 'scale', String(wanted));
    }
  }

  async restart(cluster = this._cluster, worker?: Worker): Promise<void> {
    const chosen = worker ?? (cluster && (await this._worker(cluster, 'Restart a worker')));
    if (!cluster || !chosen) {
      return;
    }
    const loses = `${chosen.name} still serves. What it holds is lost.`;
    if (chosen.state === 'lost' || (await sure(`Restart ${chosen.name}?`, loses, 'Restart'))) {
      await this._act(cluster, 'restart', chosen.name);
    }
  }

  async interrupt(cluster = this._cluster, worker = ALL): Promise<void> {
    if (cluster) {
      await this._act(cluster, 'interrupt', worker);
    }
  }

  async stop(cluster = this._cluster): Promise<void> {
    const loses = 'What its workers hold is lost.';
    if (cluster && (await sure(`Stop ${count(cluster.workers.length)}?`, loses, 'Stop'))) {
      await this._act(cluster, 'stop', ALL);
    }
  }

  async use(cluster: Cluster): Promise<void> {
    await this._benches.current?.perform({ do: 'use', of: cluster.name });
  }

  async openPanel(name?: string): Promise<void> {
    const { current: bench, notebook } = this._benches;
    const chosen = name ?? (await choice('Open a panel', bench?.state?.panels ?? []));
    if (bench && notebook && chosen) {
      await openPanel(this._app, notebook, bench, chosen);
    }
  }

  /** Where the active cell runs; `notebook` for here. */
  async aim(target?: string): Promise<void> {
    const { current: bench, notebook } = this._benches;
    const names = this._cluster?.workers.map(worker => worker.name) ?? [];
    const chosen = target ?? (await choice('Run this cell on', ['notebook', ...names, 'all']));
    if (chosen && !aim(notebook?.content.activeCell, chosen === 'notebook' ? null : chosen)) {
      bench?.say('Choose a code cell first: a target is for code.', true);
    }
  }

  private async _act(cluster: Cluster, action: Action, target: string): Promise<void> {
    await this._benches.current?.perform({ do: 'act', of: cluster.name, action, target });
  }

  private get _cluster(): Cluster | undefined {
    return current(this._benches.current?.state ?? null);
  }

  private async _number(title: string, value: number): Promise<number | null> {
    const answer = await InputDialog.getNumber({ title, value, label: 'Workers' });
    return answer.button.accept && answer.value && answer.value >= 1 ? Math.floor(answer.value) : null;
  }

  private async _worker(cluster: Cluster, title: string): Promise<Worker | undefined> {
    const name = await choice(title, cluster.workers.map(worker => worker.name));
    return cluster.workers.find(worker => worker.name === name);
  }

  private async _mayShrink(cluster: Cluster, size: number): Promise<boolean> {
    const less = cluster.workers.length - size;
    return less <= 0 || sure(`End ${count(less)}?`, 'What they hold is lost.', 'End');
  }

  private readonly _app: JupyterFrontEnd;
  private readonly _benches: Benches;
}

async function sure(title: string, body: string, label: string): Promise<boolean> {
  const buttons = [Dialog.cancelButton(), Dialog.warnButton({ label })];
  return (await showDialog({ title, body, buttons })).button.accept;
}

async function choice(title: string, items: string[]): Promise<string | null> {
  const answer = items.length ? await InputDialog.getItem({ title, items, label: title }) : null;
  return answer?.button.accept ? answer.value : null;
}
