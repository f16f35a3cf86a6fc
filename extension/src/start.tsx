// The form that starts workers: their number, and a button.
// The button is disabled while the number is not a whole number of at least 1, or while an action runs.

import React, { useState } from 'react';

import type { Actions } from './actions';
import { count } from './strings';

export interface StartProps {
  /** Whether the kernel must load rpcbench first. */
  loads: boolean;
  disabled: boolean;
  actions: Actions;
}

export function StartForm({ loads, disabled, actions }: StartProps): React.JSX.Element {
  const [size, setSize] = useState(2);
  const isValid = Number.isInteger(size) && size >= 1;
  const start = (event: React.FormEvent) => {
    event.preventDefault();
    void actions.start(size);
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
      <button type="submit" className="rb-button rb-first" disabled={disabled || !isValid}>
        Start {isValid && count(size)}
      </button>
      <p className="rb-hint">
        {loads && (
          <>
            Runs <code>%load_ext rpcbench</code> in this notebook&apos;s kernel first.{' '}
          </>
        )}
        The same as <code>%cluster start {isValid ? size : 2}</code>.
      </p>
    </form>
  );
}
