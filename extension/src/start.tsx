// How many workers to start, and the button that starts them.

import React, { useState } from 'react';

import type { Deeds } from './deeds';
import { count } from './words';

export interface StartProps {
  /** Whether rpcbench is to be loaded first. */
  loads: boolean;
  disabled: boolean;
  deeds: Deeds;
}

export function StartForm({ loads, disabled, deeds }: StartProps): React.JSX.Element {
  const [size, setSize] = useState(2);
  const good = Number.isInteger(size) && size >= 1;
  const start = (event: React.FormEvent) => {
    event.preventDefault();
    void deeds.start(size);
  };
  return (
    <form className="rb-start" onSubmit={start}>
      <label>
        Workers{' '}
        <input
          type="number"
          min={1}
          step={1}
          value={Number.isNaN(size) ? '' : size}
          onChange={event => setSize(event.target.valueAsNumber)}
        />
      </label>
      <button type="submit" className="rb-button rb-first" disabled={disabled || !good}>
        Start {good && count(size)}
      </button>
      <p className="rb-hint">
        {loads && (
          <>
            Runs <code>%load_ext rpcbench</code> in this notebook&apos;s kernel first.{' '}
          </>
        )}
        The same as <code>%cluster start {good ? size : 2}</code>.
      </p>
    </form>
  );
}
