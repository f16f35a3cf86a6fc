// Where the panels of a notebook stand beside it: the part of a page's layout that concerns one notebook, and how to make it anew.
// Both are trees of names: those of panels, and `NOTEBOOK`. Sizes are not kept, as they depend on the window.

/** The place of the notebook in a tree. */
export const NOTEBOOK = '';

/** A tree of tabs, with the fields of Lumino's `DockLayout.AreaConfig`. */
export type Area<T> = Tabs<T> | Split<T>;

interface Tabs<T> {
  type: 'tab-area';
  widgets: T[];
  currentIndex: number;
}

interface Split<T> {
  type: 'split-area';
  orientation: 'horizontal' | 'vertical';
  children: Area<T>[];
}

/** One tab to add, beside one that is there. */
export interface Step {
  name: string;
  mode: 'tab-after' | 'tab-before' | 'split-left' | 'split-right' | 'split-top' | 'split-bottom';
  beside: string;
}

/** Return the part of a layout that has names; null if nothing in it has one. */
export function prune<T>(area: Area<T>, nameOf: (widget: T) => string | null): Area<string> | null {
  if (area.type === 'tab-area') {
    const widgets = area.widgets.map(nameOf).filter(name => name !== null);
    const front = area.widgets[area.currentIndex];
    const name = front === undefined ? null : nameOf(front);
    const currentIndex = name === null ? -1 : widgets.indexOf(name);
    return widgets.length ? { type: 'tab-area', widgets, currentIndex } : null;
  }
  const children = area.children.map(child => prune(child, nameOf)).filter(child => child !== null);
  const { orientation } = area;
  return children.length > 1 ? { type: 'split-area', orientation, children } : (children[0] ?? null);
}

/** Return the names in a layout, in order. */
export function namesIn(area: Area<string>): string[] {
  return area.type === 'tab-area' ? area.widgets : area.children.flatMap(namesIn);
}

/** Return the names of the tabs that are in front, each in its area. */
export function inFront(area: Area<string>): string[] {
  if (area.type === 'tab-area') {
    return area.widgets.filter((_, i) => i === area.currentIndex);
  }
  return area.children.flatMap(inFront);
}

/** Return the steps that make a layout around one of its tabs, which is there already. */
export function planSteps(area: Area<string>, there = NOTEBOOK): Step[] {
  if (area.type === 'tab-area') {
    const at = area.widgets.indexOf(there);
    const before = area.widgets.slice(0, at).map(name => ({ name, mode: 'tab-before', beside: there }) as const);
    const rest = area.widgets.slice(at);
    return [...before, ...rest.slice(1).map((name, i) => ({ name, mode: 'tab-after', beside: rest[i] ?? there }) as const)];
  }
  const isRow = area.orientation === 'horizontal';
  const [back, on] = isRow ? (['split-left', 'split-right'] as const) : (['split-top', 'split-bottom'] as const);
  const at = area.children.findIndex(child => namesIn(child).includes(there));
  const first = area.children.map((child, i) => (i === at ? there : (namesIn(child)[0] ?? there)));
  const after = first.slice(at + 1).map((name, i) => ({ name, mode: on, beside: first[at + i] ?? there }));
  const before = first.slice(0, at).map((name, i) => ({ name, mode: back, beside: first[i + 1] ?? there }));
  return [...after, ...before.reverse(), ...area.children.flatMap((child, i) => planSteps(child, first[i]))];
}
