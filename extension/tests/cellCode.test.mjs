// Tests of which source of a cell still is the code that ran.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { hasCode } from '../lib/cellCode.js';

test('a cell has the code that ran, perhaps behind a magic', () => {
  for (const source of ['x = 1\nx', '%%remote worker1\nx = 1\nx\n', '\n%%remote all --async\nx = 1\nx', '%remote worker1 x = 1\nx']) {
    assert.ok(hasCode(source, 'x = 1\nx\n'), source);
  }
  assert.ok(hasCode('%remote worker1 x + 1', 'x + 1'));
});

test('a cell that was changed, or has more, has it no more', () => {
  for (const source of ['', 'x = 1\ny', 'y = 2\nx = 1\nx', '%time\ny = 2\nx = 1\nx', 'x = 1\nx\ny']) {
    assert.ok(!hasCode(source, 'x = 1\nx'), source);
  }
});
