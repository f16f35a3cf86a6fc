// Tests of layouts: what is kept of a page's layout, and that the steps make it anew.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { inFront, namesIn, planSteps, prune } from '../lib/layouts.js';

const tabs = (widgets, currentIndex = 0) => ({ type: 'tab-area', widgets, currentIndex });
const row = (...children) => ({ type: 'split-area', orientation: 'horizontal', children, sizes: children.map(() => 1) });
const column = (...children) => ({ type: 'split-area', orientation: 'vertical', children, sizes: children.map(() => 1) });
const withoutSizes = area =>
  area.type === 'tab-area' ? area : { type: area.type, orientation: area.orientation, children: area.children.map(withoutSizes) };

/** Do the steps on a layout of the notebook alone, as Lumino does: a split makes a pair around the tab's area. */
function build(steps) {
  let layout = tabs(['']);
  const replaced = (area, beside, make) =>
    area.type === 'tab-area'
      ? area.widgets.includes(beside) ? make(area) : area
      : { ...area, children: area.children.map(child => replaced(child, beside, make)) };
  for (const { name, mode, beside } of steps) {
    const [, side] = mode.split('-');
    layout = replaced(layout, beside, area => {
      const at = area.widgets.indexOf(beside);
      if (mode === 'tab-after') return tabs(area.widgets.toSpliced(at + 1, 0, name));
      if (mode === 'tab-before') return tabs(area.widgets.toSpliced(at, 0, name));
      const pair = side === 'left' || side === 'top' ? [tabs([name]), area] : [area, tabs([name])];
      return (side === 'left' || side === 'right' ? row : column)(...pair);
    });
  }
  return layout;
}

/** Merge a split into one around it that has its direction, as Lumino does. */
function flat(area) {
  if (area.type === 'tab-area') return tabs(area.widgets);
  const children = area.children.map(flat);
  const same = child => child.type === 'split-area' && child.orientation === area.orientation;
  return withoutSizes({ ...area, children: children.flatMap(child => (same(child) ? child.children : [child])) });
}

const LAYOUTS = [
  tabs(['', 'rrefs']),
  tabs(['workers', 'rrefs', '', 'messages', 'shards']),
  row(tabs(['']), tabs(['dashboard', 'rrefs', 'shards'])),
  row(tabs(['workers']), tabs(['']), tabs(['rrefs']), tabs(['shards', 'messages'])),
  column(row(tabs(['a', 'b']), column(tabs(['c']), tabs(['']), tabs(['d', 'e'])), tabs(['f'])), tabs(['g'])),
  row(tabs(['']), column(tabs(['a']), row(tabs(['b', 'c']), tabs(['d']))))
];

test('the steps make the layout that was', () => {
  for (const layout of LAYOUTS) {
    assert.deepEqual(flat(build(planSteps(layout))), flat(layout));
  }
});

test('only named tabs are kept, with those that are in front', () => {
  const own = name => (name.startsWith('other') ? null : name);
  const page = row(column(tabs(['other.ipynb', '']), tabs(['other:rrefs'])), tabs(['other:workers', 'rrefs', 'shards'], 2));
  const kept = prune(page, own);
  assert.deepEqual(kept, withoutSizes(row(tabs([''], -1), tabs(['rrefs', 'shards'], 1))));
  assert.deepEqual(inFront(kept), ['shards']);
  assert.deepEqual(namesIn(kept), ['', 'rrefs', 'shards']);
  assert.equal(prune(tabs(['other.ipynb']), own), null);
});
