// The commands, for the palette, for shortcuts and for other extensions.
// Guarantees: each command but `sidebar` does the same as a line of `%cluster`, `%panel` or `%%remote`; a command that lacks
// an argument asks the user for it; a command that could do nothing is disabled.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ICommandPalette } from '@jupyterlab/apputils';

import type { Actions } from './actions';
import type { KernelSessions } from './sessions';
import { current } from './strings';

const CATEGORY = 'rpcbench';

export function addCommands(
  app: JupyterFrontEnd, sessions: KernelSessions, actions: Actions, palette: ICommandPalette | null
): void {
  const canStart = () => sessions.current !== null && ['absent', 'loaded'].includes(sessions.current.phase);
  const hasCluster = () => current(sessions.current?.state ?? null) !== undefined;
  const add = (id: string, label: string, isEnabled: () => boolean, execute: (args: Args) => Promise<void>) => {
    app.commands.addCommand(`rpcbench:${id}`, { label, isEnabled, execute });
    palette?.addItem({ command: `rpcbench:${id}`, category: CATEGORY });
  };
  add('start', 'Start Workers…', canStart, ({ size }) => actions.start(size));
  add('scale', 'Change the Number of Workers…', hasCluster, ({ size }) => actions.scale(undefined, size));
  add('restart', 'Restart a Worker…', hasCluster, () => actions.restart());
  add('interrupt', 'Interrupt All Workers', hasCluster, () => actions.interrupt());
  add('stop', 'Stop All Workers…', hasCluster, () => actions.stop());
  add('panel', 'Open a Panel…', hasCluster, ({ name }) => actions.openPanel(name));
  add('target', 'Run This Cell on…', hasCluster, ({ target }) => actions.setTarget(target));
  add('sidebar', 'Show the Sidebar', () => true, async () => app.shell.activateById('rpcbench-sidebar'));
  const refresh = () => app.commands.notifyCommandChanged();
  sessions.changed.connect(refresh);
}

/** The arguments of a command, all optional. */
interface Args {
  size?: number;
  name?: string;
  target?: string;
}
