// The line above the panels of a tab: why they are not live, and what the user can do. It is hidden while they are.

import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import type { PanelTab } from './panelTab';
import { Progress } from './progress';
import { current, FIRST_SIZE, STRINGS } from './strings';

const WORDS = STRINGS.panels;

export class TabNote extends ReactWidget {
  constructor(tab: PanelTab, openNotebook: (path: string) => void) {
    super();
    this.addClass('rbx-note');
    this._tab = tab;
    this._openNotebook = openNotebook;
  }

  protected override render(): React.JSX.Element {
    const { session } = this._tab;
    const text = this._text();
    this.setHidden(!text);
    return (
      <div role="status" aria-label={WORDS.note}>
        {text}
        {session?.notice?.isError && <span className="rbx-bad">{session.notice.text}</span>}
        {session?.doing.map(one => <Progress key={one} text={one} />)}
        <span className="rbx-deeds">{text && !session?.doing.length && this._buttons()}</span>
      </div>
    );
  }

  private _text(): string {
    const { session, path, isDrawn } = this._tab;
    switch (session?.phase) {
      case undefined:
        return this._tab.isRestored ? WORDS.notebookClosed(path) : WORDS.waitsForNotebook(path);
      case 'none':
        return WORDS.noKernel(path);
      case 'unconnected':
        return STRINGS.noConnection;
      case 'loading':
        return STRINGS.loading;
      case 'unknown':
        return STRINGS.waitsForKernel;
      default:
        if (this._mayStart) {
          return session?.runsCell ? STRINGS.start.cellRuns : isDrawn ? WORDS.stopped : WORDS.none(path);
        }
        if (this._tab.isGone) {
          return WORDS.gone(this._tab.cluster, isDrawn);
        }
        return !session || session.state || isDrawn ? '' : STRINGS.waitsForKernel;
    }
  }

  /** Whether the kernel is there, and no workers run in it. */
  private get _mayStart(): boolean {
    const { session } = this._tab;
    return session?.phase === 'absent' || (session?.phase === 'loaded' && session.state?.clusters.length === 0);
  }

  private _buttons(): React.JSX.Element {
    const { session, path } = this._tab;
    const size = session?.lastSize ?? FIRST_SIZE;
    const waits = session?.phase === 'absent' && session.runsCell;
    const other = this._tab.isGone ? current(session?.state ?? null)?.name : undefined;
    // Under the name that the tab's cluster had, so that the tab shows it.
    const named = this._tab.cluster ? { name: this._tab.cluster } : {};
    const start = () => void session?.perform({ do: 'start', size, ...named }, STRINGS.start.doing(size));
    return (
      <>
        {this._mayStart && (
          <button className="rbx-button rbx-first" onClick={start} disabled={waits} title={waits ? STRINGS.start.busy : undefined}>
            {STRINGS.start.button(size)}
          </button>
        )}
        {other !== undefined && (
          <button className="rbx-button rbx-first" onClick={() => this._tab.showCluster(other)}>
            {WORDS.showOther(other)}
          </button>
        )}
        {!session && (
          <button className="rbx-button rbx-first" onClick={() => this._openNotebook(path)}>
            {WORDS.open}
          </button>
        )}
        <button className="rbx-button" onClick={() => this._tab.close()}>
          {WORDS.close}
        </button>
      </>
    );
  }

  private readonly _tab: PanelTab;
  private readonly _openNotebook: (path: string) => void;
}
