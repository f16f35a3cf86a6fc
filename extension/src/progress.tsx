// A running action: its text, and a bar. The bar shows a share if the text has one, as `1 of 2`, and else that something runs.

import React from 'react';

export function Progress({ text }: { text: string }): React.JSX.Element {
  const [done, all] = (/(\d+) of (\d+)/.exec(text) ?? []).slice(1).map(Number);
  return (
    <div className="rbx-progress">
      {text}
      <progress aria-hidden="true" {...(all ? { value: done, max: all } : {})} />
    </div>
  );
}
