// Compares a cell with the code that has run.

/** Whether a cell's source is this code, perhaps behind a magic that sends it to workers. */
export function hasCode(source: string, code: string): boolean {
  const [own, wanted] = [source.trim(), code.trim()];
  return own.endsWith(wanted) && /^\s*(%.*)?\s*$/.test(own.slice(0, own.length - wanted.length));
}
