// Tests of the texts: they stand in one table, and use one word for one thing.

import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { test } from 'node:test';

import { clockTime, count, STRINGS } from '../lib/strings.js';

const sources = new URL('../src/', import.meta.url);

/** All texts of a table; functions are called with their arguments' places. */
const texts = table =>
  Object.values(table).flatMap(one =>
    typeof one === 'string' ? [one] : typeof one === 'function' ? [String(one(2, 'two'))] : texts(one)
  );

test('no other file has a text that users read', () => {
  for (const name of readdirSync(sources).filter(one => one.endsWith('.tsx'))) {
    const code = readFileSync(new URL(name, sources), 'utf8').replace(/^.*\/\/.*$/gm, '');
    assert.deepEqual(code.match(/(?<=<[^=>]*>)\s*[A-Za-z][^<>{}();=]*(?=<\/)/g), null, name);
    assert.deepEqual(code.match(/(title|aria-label|alt|caption)="[^"]+"/g), null, name);
  }
});

test('a time of day has 24 hours, as in panels', () => {
  const times = [[0, 5], [9, 30], [22, 44]].map(([hours, minutes]) => new Date(2026, 0, 2, hours, minutes).getTime() / 1000);
  assert.deepEqual(times.map(clockTime), ['00:05', '09:30', '22:44']);
});

test('numbers are said in words that fit', () => {
  assert.deepEqual([1, 2].map(count), ['1 worker', '2 workers']);
  assert.deepEqual([2, 3].map(STRINGS.worker.started), ['started twice', 'started 3 times']);
  assert.deepEqual([1, 2].map(size => STRINGS.ask.loseThem(size)), ['it holds', 'they hold'].map(words => `Everything ${words} will be lost.`));
  assert.deepEqual([0, 1, 3].map(STRINGS.ask.lose), [
    'Everything its workers hold will be lost.',
    'Everything its workers hold will be lost, also the value of 1 RRef here.',
    'Everything its workers hold will be lost, also the values of 3 RRefs here.'
  ]);
  assert.deepEqual(STRINGS.status.text(0, 0), 'rpcbench: no workers');
  assert.deepEqual(STRINGS.status.text(3, 1), 'rpcbench: 3 workers, 1 lost');
});

test('a text uses none of the words that others replace', () => {
  for (const text of texts(STRINGS)) {
    assert.doesNotMatch(text, /\bserves?\b|\bleft\b|filtered out|\bsure\b|undefined/, text);
  }
});
