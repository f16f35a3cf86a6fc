// Tests of the lateness: that of a round trip, also of one that is not over, and 0 where a page is not late.

import assert from 'node:assert/strict';
import { mock, test } from 'node:test';

globalThis.window = globalThis;
const { Lateness } = await import('../lib/lateness.js');

function measured() {
  let answer;
  const calls = [];
  const lateness = new Lateness(() => calls.push(lateness.seconds));
  const reply = lateness.measure(() => new Promise(resolve => (answer = resolve)));
  return { lateness, calls, reply, answer: value => answer(value) };
}

test('a page that waits for a reply is late by that time, and is told so each second', async t => {
  mock.timers.enable({ apis: ['Date', 'setInterval'] });
  t.after(() => mock.timers.reset());
  const { lateness, calls, reply, answer } = measured();
  mock.timers.tick(3000);
  assert.equal(lateness.seconds, 0);
  assert.deepEqual(calls, []);
  for (let second = 4; second < 7; second += 1) mock.timers.tick(1000);
  assert.deepEqual(calls, [4, 5, 6]);
  answer('there');
  assert.equal(await reply, 'there');
  assert.equal(lateness.seconds, 6); // of the last round trip
  mock.timers.tick(60_000);
  assert.equal(lateness.seconds, 6);
});

test('a quick reply ends the lateness, and so does another kernel', async t => {
  mock.timers.enable({ apis: ['Date', 'setInterval'] });
  t.after(() => mock.timers.reset());
  const { lateness, reply, answer } = measured();
  mock.timers.tick(9000);
  answer('');
  await reply;
  assert.equal(lateness.seconds, 9);
  await lateness.measure(async () => '');
  assert.equal(lateness.seconds, 0);
  void lateness.measure(() => new Promise(() => {}));
  mock.timers.tick(9000);
  assert.equal(lateness.seconds, 9);
  lateness.reset();
  assert.equal(lateness.seconds, 0);
});

test('requests to an earlier kernel change nothing, and the oldest of several counts', async t => {
  mock.timers.enable({ apis: ['Date', 'setInterval'] });
  t.after(() => mock.timers.reset());
  const { lateness, reply, answer } = measured();
  mock.timers.tick(9000);
  lateness.reset();
  answer('');
  await reply;
  assert.equal(lateness.seconds, 0);
  const answers = [];
  const send = () => new Promise(resolve => answers.push(resolve));
  const first = lateness.measure(send);
  mock.timers.tick(4000);
  const later = lateness.measure(send);
  mock.timers.tick(6000);
  assert.equal(lateness.seconds, 10);
  answers[0]('');
  await first;
  mock.timers.tick(10_000);
  assert.equal(lateness.seconds, 16); // of the second one, which still waits
  answers[1]('');
  await later;
  assert.equal(lateness.seconds, 16);
});
