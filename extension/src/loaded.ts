// Whether rpcbench is loaded in a kernel, and how a page loads it. The kernel announces it, and a page that comes later asks.
// Guarantee: the question is silent: nothing appears in the notebook, its history or its prompt numbers. A busy kernel replies
// after its cell, and after those that are queued.

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel } from '@jupyterlab/services';

import { STRINGS } from './strings';

const LOAD = '%load_ext rpcbench';
const ANNOUNCEMENT = 'rpcbench-loaded';
const LOADED = "'rpcbench' in get_ipython().extension_manager.loaded";

/**
 * Call the function each time a kernel of the context says that it has loaded rpcbench. It says so by a message of a comm that no
 * page has, which other front ends ignore.
 */
export function onLoaded(context: ISessionContext, call: () => void): void {
  context.iopubMessage.connect((_, { header, content }) => {
    if ((header.msg_type as string) === 'comm_msg' && (content as { comm_id?: string }).comm_id === ANNOUNCEMENT) {
      call();
    }
  });
}

/** Ask a Python kernel. Return null where it does not reply: it is gone, or was interrupted. */
export async function askWhetherLoaded(kernel: Kernel.IKernelConnection): Promise<boolean | null> {
  const question = { code: '', silent: true, store_history: false, user_expressions: { here: LOADED } };
  const content = (await kernel.requestExecute(question).done.catch(() => null))?.content;
  return content ? content.status === 'ok' && JSON.stringify(content.user_expressions).includes('"True"') : null;
}

/** Run `%load_ext rpcbench`. Return why that failed, '' if it did not, and null where the kernel does not reply. */
export async function loadExtension(kernel: Kernel.IKernelConnection): Promise<string | null> {
  const content = (await kernel.requestExecute({ code: LOAD, silent: true, store_history: false }).done)?.content;
  if (!content || content.status === 'ok') {
    return content ? '' : null;
  }
  return content.status === 'error' ? content.evalue : STRINGS.interrupted;
}
