// The first line of a cell that runs on workers, such as `%%remote worker1 -i x`: reads and changes its targets.
// Guarantees: the functions are pure. A change of the targets keeps the options as they are written, in their order; the
// line is removed as a whole, with its options.

const LINE = /^(\s*)%%remote(?![^\s])([^\n]*)(\n|$)/;
const WORD = /(?:"[^"]*"|'[^']*'|[^\s"'])+/g;
const OPTIONS_WITH_VALUE = new Set(['-i', '-o', '--rref', '--timeout']);

/** Replace the text from `start` to `end`, offsets into the source, by `text`. */
export interface Edit {
  start: number;
  end: number;
  text: string;
}

/** Return the targets that the cell's first line names, as they are written; null if the cell runs in the notebook. */
export function targetOf(source: string): string | null {
  const found = LINE.exec(source);
  return found ? split(found[2] ?? '').targets.join(' ') : null;
}

/** Return the edit that makes the cell run on `target`, or in the notebook for null; null if it runs there already. */
export function retarget(source: string, target: string | null): Edit | null {
  const found = LINE.exec(source);
  if (!found) {
    return target === null ? null : { start: 0, end: 0, text: `%%remote ${target}\n` };
  }
  const start = found[1]?.length ?? 0;
  if (target === null) {
    return { start, end: found[0].length, text: '' };
  }
  const { targets, options } = split(found[2] ?? '');
  const end = found[0].length - (found[3]?.length ?? 0);
  return targets.join(' ') === target ? null : { start, end, text: ['%%remote', target, ...options].join(' ') };
}

/** Split the rest of the line into targets and options; the value of an option follows it. */
function split(rest: string): { targets: string[]; options: string[] } {
  const targets: string[] = [];
  const options: string[] = [];
  let isValue = false;
  for (const word of rest.match(WORD) ?? []) {
    (isValue || word.startsWith('-') ? options : targets).push(word);
    isValue = !isValue && OPTIONS_WITH_VALUE.has(word);
  }
  return { targets, options };
}
