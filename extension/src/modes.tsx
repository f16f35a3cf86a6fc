// The chips of what is on: faults, held messages, a recording, `%autoremote`. A click on a chip ends it.
// Guarantees: a chip is there as long as the kernel says that its mode is on, in the sidebar and in the status bar.

import { closeIcon } from '@jupyterlab/ui-components';
import React from 'react';

import type { KernelSession } from './session';
import { STRINGS } from './strings';

export function ModeChips({ session }: { session: KernelSession | null }): React.JSX.Element {
  const words = STRINGS.modes;
  return (
    <>
      {session?.state?.modes.map(({ name, text, end }) => (
        <button
          key={`${name} ${end.of}`}
          className="rbx-chip"
          data-mode={name}
          title={words.endTip(text, words.magic[name])}
          aria-label={words.end(text)}
          onClick={() => void session.perform(end)}
        >
          {text}
          <closeIcon.react tag="span" />
        </button>
      ))}
    </>
  );
}
