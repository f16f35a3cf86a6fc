// The commands, for the palette, for shortcuts and for other extensions.
// Guarantees: each command but `sidebar` does the same as a line of `%cluster`, `%panel` or `%%remote`; a command that lacks
// an argument asks the user for it; a command that could do nothing is disabled.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ICommandPalette } from '@jupyterlab/apputils';

import type { Actions } from './actions';
import type { KernelSessions } from './sessions';
import { current, DASHBOARD, STRINGS } from './strings';

const CATEGORY = STRINGS.product;
const LABELS = STRINGS.commands;

export function addCommands(
  app: JupyterFrontEnd, sessions: KernelSessions, actions: Actions, palette: ICommandPalette | null
): void {
  const canStart = () => sessions.current !== null && ['absent', 'loaded'].includes(sessions.current.phase);
  const hasCluster = () => current(sessions.current?.state ?? null) !== undefined;
  const add = (id: keyof typeof LABELS, isEnabled: () => boolean, execute: (args: Args) => Promise<void>) => {
    app.commands.addCommand(`rpcbench:${id}`, { label: LABELS[id], isEnabled, execute });
    palette?.addItem({ command: `rpcbench:${id}`, category: CATEGORY });
  };
  add('start', canStart, ({ size }) => actions.start(size));
  add('scale', hasCluster, ({ size }) => actions.scale(undefined, size));
  add('restart', hasCluster, () => actions.restart());
  add('interrupt', hasCluster, () => actions.interrupt());
  add('stop', hasCluster, () => actions.stop());
  add('dashboard', canStart, () => actions.openPanel(DASHBOARD));
  add('panel', hasCluster, ({ name }) => actions.openPanel(name));
  add('target', hasCluster, ({ target }) => actions.setTarget(target));
  add('sidebar', () => true, async () => app.shell.activateById('rpcbench-sidebar'));
  const refresh = () => app.commands.notifyCommandChanged();
  sessions.changed.connect(refresh);
}

/** The arguments of a command, all optional. */
interface Args {
  size?: number;
  name?: string;
  target?: string;
}
