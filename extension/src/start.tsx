// The form that starts workers: their number, and a button.
// The button is disabled while the number is not a whole number of at least 1, or while an action runs.

import React, { useState } from 'react';

import type { Actions } from './actions';
import { STRINGS } from './strings';

export interface StartProps {
  /** Whether the kernel must load rpcbench first. */
  loads: boolean;
  /** The number that is proposed. */
  first: number;
  /** Whether a cell runs, which may start some. */
  waits: boolean;
  disabled: boolean;
  actions: Actions;
}

export function StartForm({ loads, first, waits, disabled, actions }: StartProps): React.JSX.Element {
  const [size, setSize] = useState(first);
  const isValid = Number.isInteger(size) && size >= 1;
  const start = (event: React.FormEvent) => {
    event.preventDefault();
    void actions.start(size);
  };
  return (
    <form className="rbx-start" onSubmit={start}>
      <label>
        {STRINGS.workers}{' '}
        <input
          type="number"
          min={1}
          step={1}
          value={Number.isNaN(size) ? '' : size}
          onChange={event => setSize(event.target.valueAsNumber)}
        />
      </label>
      <button
        type="submit"
        className="rbx-button rbx-first"
        disabled={disabled || !isValid}
        title={waits ? STRINGS.start.busy : undefined}
      >
        {STRINGS.start.button(isValid ? size : undefined)}
      </button>
      <p className="rbx-hint">
        {waits ? (
          STRINGS.start.cellRuns
        ) : (
          <Coded text={`${loads ? `${STRINGS.start.loads} ` : ''}${STRINGS.start.same(isValid ? size : first)}`} />
        )}
      </p>
    </form>
  );
}

/** A text whose parts between backticks are code. */
function Coded({ text }: { text: string }): React.JSX.Element {
  return <>{text.split('`').map((part, index) => (index % 2 ? <code key={index}>{part}</code> : part))}</>;
}
