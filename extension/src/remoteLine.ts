// The first line of a cell that runs on workers, `%%remote worker1 -i x`: which targets it names, and how to change
// them. Options stay as they are written when the targets change, and go with the line when it goes.

const LINE = /^(\s*)%%remote(?![^\s])([^\n]*)(\n|$)/;
const WORD = /(?:"[^"]*"|'[^']*'|[^\s"'])+/g;
const TAKES_A_VALUE = new Set(['-i', '-o', '--rref', '--timeout']);

export interface Edit {
  start: number;
  end: number;
  text: string;
}

/** The targets that the cell's first line names, as they are written; null where the cell runs in the notebook. */
export function targetOf(source: string): string | null {
  const found = LINE.exec(source);
  return found ? sorted(found[2] ?? '').targets.join(' ') : null;
}

/** What to change so that the cell runs on `target`, in the notebook for null; null where it does so already. */
export function retarget(source: string, target: string | null): Edit | null {
  const found = LINE.exec(source);
  if (!found) {
    return target === null ? null : { start: 0, end: 0, text: `%%remote ${target}\n` };
  }
  const start = found[1]?.length ?? 0;
  if (target === null) {
    return { start, end: found[0].length, text: '' };
  }
  const { targets, options } = sorted(found[2] ?? '');
  const end = found[0].length - (found[3]?.length ?? 0);
  return targets.join(' ') === target ? null : { start, end, text: ['%%remote', target, ...options].join(' ') };
}

function sorted(rest: string): { targets: string[]; options: string[] } {
  const targets: string[] = [];
  const options: string[] = [];
  let value = false;
  for (const word of rest.match(WORD) ?? []) {
    (value || word.startsWith('-') ? options : targets).push(word);
    value = !value && TAKES_A_VALUE.has(word);
  }
  return { targets, options };
}
