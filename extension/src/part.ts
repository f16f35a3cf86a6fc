// The place of one panel: the kernel makes a widget and sends its MIME bundle, which the notebook's own renderers draw.
// Guarantees: from the request until the first picture a line says that the panel is loading, and no empty frame is seen. The
// line goes after a while in any case, so that an error of the renderers is seen.

import type { IMimeBundle } from '@jupyterlab/nbformat';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { OutputAreaModel, SimplifiedOutputArea } from '@jupyterlab/outputarea';
import { Panel, Widget } from '@lumino/widgets';

import { KernelComm } from './comm';
import type { KernelSession } from './session';
import { STRINGS } from './strings';

const LOADING_CLASS = 'rbx-loading';
const MOST_LOADING_MILLISECONDS = 60_000;
const IPYWIDGETS_LOADS = 'Loading widget...';

export class Part extends Panel {
  constructor(name: string) {
    super();
    this._name = name;
    this.addClass('rbx-part');
    this.node.dataset['panel'] = name;
    this._line.className = 'rbx-loads';
    this._line.setAttribute('role', 'status');
    this.node.append(this._line);
    this._observer = new MutationObserver(() => this._isSettled && this._showLoading(false));
  }

  get isDrawn(): boolean {
    return this._output !== null;
  }

  /** Ask the kernel for the panel of a cluster, unless it has been asked since the last `expire`. */
  ask(session: KernelSession, notebook: NotebookPanel, cluster: string): void {
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
    this._showLoading(!this._output);
    void this._comm.open({ do: 'panel', name: this._name, of: cluster });
  }

  /** Ask again at the next opportunity; until then the picture stays. */
  expire(): void {
    this._isExpired = true;
    if (!this._output) {
      this._showLoading(false);
    }
  }

  override dispose(): void {
    this._showLoading(false);
    this._comm?.close();
    this._comm = null;
    super.dispose();
  }

  private _draw(notebook: NotebookPanel, bundle: IMimeBundle): void {
    const model = new OutputAreaModel({ trusted: true });
    this._put(new SimplifiedOutputArea({ model, rendermime: notebook.content.rendermime }));
    this._showLoading(true);
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
      this._showLoading(false);
    } else {
      this.expire();
    }
  }

  private _put(output: Widget): void {
    this._output?.dispose();
    this._output = output;
    this.addWidget(output);
  }

  /** Whether there is a picture, or what the renderers say instead. */
  private get _isSettled(): boolean {
    const node = this._output?.node;
    const said = node?.textContent?.trim();
    return Boolean(node?.querySelector('.rb-panel') ? node.querySelector('.rb-drawn') : said && said !== IPYWIDGETS_LOADS);
  }

  private _showLoading(isLoading: boolean): void {
    window.clearTimeout(this._timer);
    this._observer.disconnect();
    this.toggleClass(LOADING_CLASS, isLoading);
    this._line.textContent = isLoading ? STRINGS.panels.loading(this._name) : '';
    if (isLoading) {
      this._timer = window.setTimeout(() => this._showLoading(false), MOST_LOADING_MILLISECONDS);
      this._observer.observe(this.node, { subtree: true, childList: true, attributeFilter: ['class'] });
    }
  }

  private readonly _name: string;
  private readonly _line = document.createElement('p');
  private readonly _observer: MutationObserver;
  private _timer = 0;
  private _comm: KernelComm | null = null;
  private _output: Widget | null = null;
  private _isExpired = true;
}
