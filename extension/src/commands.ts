// Commands, for the palette, for shortcuts and for other extensions. Each does what a line of `%cluster` or `%panel` does.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ICommandPalette } from '@jupyterlab/apputils';

import type { Benches } from './benches';
import type { Deeds } from './deeds';
import { current } from './words';

const CATEGORY = 'rpcbench';

export function addCommands(
  app: JupyterFrontEnd, benches: Benches, deeds: Deeds, palette: ICommandPalette | null
): void {
  const known = () => benches.current !== null && ['absent', 'here'].includes(benches.current.phase);
  const runs = () => current(benches.current?.state ?? null) !== undefined;
  const add = (id: string, label: string, isEnabled: () => boolean, execute: (args: Args) => Promise<void>) => {
    app.commands.addCommand(`rpcbench:${id}`, { label, isEnabled, execute });
    palette?.addItem({ command: `rpcbench:${id}`, category: CATEGORY });
  };
  add('start', 'Start Workers…', known, ({ size }) => deeds.start(size));
  add('scale', 'Change the Number of Workers…', runs, ({ size }) => deeds.scale(undefined, size));
  add('restart', 'Restart a Worker…', runs, () => deeds.restart());
  add('interrupt', 'Interrupt All Workers', runs, () => deeds.interrupt());
  add('stop', 'Stop All Workers…', runs, () => deeds.stop());
  add('panel', 'Open a Panel…', runs, ({ name }) => deeds.openPanel(name));
  add('target', 'Run This Cell on…', runs, ({ target }) => deeds.aim(target));
  add('sidebar', 'Show the Sidebar', () => true, async () => app.shell.activateById('rpcbench-sidebar'));
  const renew = () => app.commands.notifyCommandChanged();
  benches.changed.connect(renew);
}

interface Args {
  size?: number;
  name?: string;
  target?: string;
}
