// Tests of where a cell is looked for: copies of a notebook have cells of the same ids.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { findCell } from '../lib/revealCell.js';

const notebook = (...ids) => ({ content: { widgets: ids.map(id => ({ model: { id } })) } });

test('a cell is looked for in the notebook of the panel first', () => {
  const [first, second] = [notebook('a', 'b'), notebook('a')];
  const tracker = { find: test => [first, second].find(test) };
  assert.equal(findCell(tracker, second, 'a').panel, second);
  assert.equal(findCell(tracker, second, 'a').cell, second.content.widgets[0]);
  assert.equal(findCell(tracker, null, 'a').panel, first);
  assert.equal(findCell(tracker, second, 'b').panel, first, 'a cell of another notebook of the cluster');
  assert.equal(findCell(tracker, second, 'c'), null);
});
