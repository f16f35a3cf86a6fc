// A button that shows an icon and says in words what it does. While it can do nothing it keeps the keyboard's focus.

import type { LabIcon } from '@jupyterlab/ui-components';
import React from 'react';

export interface ButtonProps {
  icon: LabIcon;
  label: string;
  disabled?: boolean;
  flip?: boolean;
  onClick: () => void;
}

export function IconButton({ icon, label, disabled = false, flip = false, onClick }: ButtonProps): React.JSX.Element {
  const className = `rb-icon${flip ? ' rb-flip' : ''}`;
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
