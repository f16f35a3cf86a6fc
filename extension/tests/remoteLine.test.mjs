// Tests of the first line of a cell: its targets are read correctly, and a change of targets changes nothing else.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { retarget, targetOf } from '../lib/remoteLine.js';

const edited = (source, target) => {
  const edit = retarget(source, target);
  return edit ? source.slice(0, edit.start) + edit.text + source.slice(edit.end) : source;
};

test('a cell without the line runs in the notebook', () => {
  for (const source of ['', 'x = 1', 'x = 1\n%%remote worker1', '%%remotely worker1', '# %%remote worker1']) {
    assert.equal(targetOf(source), null);
    assert.equal(retarget(source, null), null);
  }
});

test('targets are separated from options and their values', () => {
  const lines = {
    '%%remote worker1\nx': 'worker1',
    '%%remote worker1 worker2 -i a,b --async': 'worker1 worker2',
    '%%remote -o y --timeout 10 worker1': 'worker1',
    '\n\n  %%remote all --tabs\nx': 'all',
    '%%remote --rref=model [1:]': '[1:]',
    '%%remote': '',
    '%%remote   \nx': ''
  };
  for (const [source, target] of Object.entries(lines)) {
    assert.equal(targetOf(source), target, source);
  }
});

test('the line is added, changed and removed', () => {
  assert.equal(edited('x = 1', 'worker1'), '%%remote worker1\nx = 1');
  assert.equal(edited('', 'all'), '%%remote all\n');
  assert.equal(edited('%%remote worker1\nx = 1', 'worker2'), '%%remote worker2\nx = 1');
  assert.equal(edited('%%remote worker1\nx = 1', null), 'x = 1');
  assert.equal(edited('%%remote worker1', null), '');
  assert.equal(edited('%%time\nx', 'worker1'), '%%remote worker1\n%%time\nx');
});

test('options stay as they are written', () => {
  const source = "%%remote worker1 -i a,b worker2 --timeout 10 -o y --rref='m n'\nx";
  assert.equal(edited(source, 'all'), "%%remote all -i a,b --timeout 10 -o y --rref='m n'\nx");
  assert.equal(edited('\n%%remote -o y worker1\r\nx', 'worker2'), '\n%%remote worker2 -o y\nx');
});

test('a cell that already has the target is not edited', () => {
  assert.equal(retarget('%%remote  worker1   -i a\nx', 'worker1'), null);
});
