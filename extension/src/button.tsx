// A button with an icon. Its label stands in the tooltip and is read by screen readers.
// Guarantees: a disabled button keeps the keyboard focus, as `aria-disabled` is set instead of `disabled`.

import type { LabIcon } from '@jupyterlab/ui-components';
import React from 'react';

export interface ButtonProps {
  icon: LabIcon;
  label: string;
  disabled?: boolean;
  /** Whether the icon is mirrored. */
  flip?: boolean;
  onClick: () => void;
}

export function IconButton({ icon, label, disabled = false, flip = false, onClick }: ButtonProps): React.JSX.Element {
  const className = `rbx-icon${flip ? ' rbx-flip' : ''}`;
  return (
    <button
      className={className}
      title={label}
      aria-label={label}
      aria-disabled={disabled}
      onClick={() => !disabled && onClick()}
    >
      <icon.react tag="span" elementSize="small" />
    </button>
  );
}
