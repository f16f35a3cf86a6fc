// What the frame of all panels works out, without a browser.

import assert from "node:assert/strict";
import test from "node:test";

import { load, plain } from "./load.mjs";

const names = ["LiveView", "KernelClock", "receiveAgain", "isSaved", "kernelState", "panelState", "clockTime", "leave", "outputsOf", "STRINGS"];
const { LiveView, KernelClock, receiveAgain, isSaved, kernelState, panelState, clockTime, leave, outputsOf, STRINGS } = load(
  "rrefs", ...names);

const manager = (kernel) => ({ kernel });
const KERNEL = { id: "a", status: "idle", connectionStatus: "connected" };
const LIVE = { name: "live", at: 0 };

test("a panel knows its kernel by what the front end says", () => {
  assert.equal(kernelState(manager(KERNEL), "a", false), "there");
  assert.equal(kernelState(manager({ ...KERNEL, status: "busy" }), "a", false), "there");
  assert.equal(kernelState(manager(KERNEL), "a", true), "restarted");
  assert.equal(kernelState(manager({ ...KERNEL, id: "b" }), "a", false), "restarted");
  assert.equal(kernelState(manager({ ...KERNEL, connectionStatus: "connecting" }), "a", false), "cut");
  assert.equal(kernelState(manager(null), "a", true), "gone");
  assert.equal(kernelState(manager({ ...KERNEL, status: "dead" }), "a", false), "gone");
});

test("where the front end says nothing of its kernel a panel is live until its comm is cut", () => {
  assert.equal(kernelState(undefined, undefined, false), "there");
  assert.equal(kernelState({}, undefined, false), "there");
  assert.equal(kernelState({}, undefined, true), "gone");
});

test("a panel that was read from a saved notebook never had this kernel", () => {
  const state = {};
  const model = (comm_live) => ({ get: (name) => (name === "state" ? state : null), comm_live });
  const kept = (...models) => ({ ...manager(KERNEL), _modelsSync: new Map(models.entries()) });
  assert.ok(isSaved(kept({ get: () => undefined, comm_live: true }, model(false)), state));
  assert.ok(!isSaved(kept(model(true)), state));
  assert.ok(!isSaved(undefined, state) && !isSaved({}, state));
});

test("the chip says the first thing that is so", () => {
  const at = new Date(2026, 10, 27, 16, 5).getTime() / 1000;
  const kind = (...all) => plain(panelState(...all)).kind;
  assert.deepEqual(plain(panelState(LIVE, "there", "", false)).text, "Live");
  assert.equal(kind(LIVE, "there", "", true), "paused");
  assert.equal(kind(LIVE, "restarted", "", true), "restarted");
  assert.equal(kind(LIVE, "there", "ValueError", true), "failed");
  assert.equal(panelState({ name: "stopped", at }, "there", "ValueError", true).text, "Stopped 16:05");
  assert.equal(kind({ name: "stopped", at }, "restarted", "", false), "restarted");
  assert.equal(kind({ name: "record", at: 0 }, "gone", "", false), "record");
  assert.equal(kind(undefined, "there", "", false), "live");
  assert.equal(clockTime(at), "16:05");
});

test("the chip says how old a picture is that nobody confirms", () => {
  const chip = (age, isPaused = false) => plain(panelState(LIVE, "there", "", isPaused, age));
  assert.equal(chip(1.9).kind, "live");
  assert.deepEqual([chip(3.2).kind, chip(3.2).text, chip(150).text], ["late", "Picture of 3 s ago", "Picture of 2 min ago"]);
  assert.equal(chip(150, true).kind, "paused");
  assert.equal(plain(panelState({ name: "stopped", at: 0 }, "there", "", false, 150)).kind, "stopped");
});

// A model as anywidget passes it: `say` is a message of the kernel.
const makeModel = (version) => {
  const heard = {};
  return { sent: [], send(message) { this.sent.push(message); }, state: { version, view: {} }, get(name) { return this[name]; }, on: (name, call) => (heard[name] = call),
    say: (message) => heard["msg:custom"](message) };
};

test("a delta, a whole state and a beat of the same version confirm a picture", () => {
  const model = makeModel(4);
  const live = new LiveView(model);
  const isHeard = (message) => {
    live.heardAt = 0;
    model.say(message);
    return live.heardAt > 0;
  };
  assert.ok(isHeard({ kind: "beat", version: 4 }));
  assert.ok(!isHeard({ kind: "beat", version: 5 })); // it has missed one
  assert.ok(isHeard({ kind: "delta", version: 5, delta: {} }));
  assert.ok(!isHeard({ kind: "delta", version: 7, delta: {} }));
  live.heardAt = 0;
  live.onState({ version: 7, view: {} });
  assert.ok(live.heardAt > 0 && live.version === 7);
});

test("the page reports where its lateness begins and ends, though it has no new picture", () => {
  const model = makeModel(1);
  const live = new LiveView(model);
  const beat = (late) => {
    live.reported.at = 0; // a second later
    model.say({ kind: "beat", version: 1, at: Date.now() / 1000 - late });
  };
  for (const late of [0, 0.2, 30, 40, 0.3, 0]) beat(late);
  assert.deepEqual(plain(model.sent).map(({ late }) => Math.round(late / 1000)), [0, 30, 0]);
});

test("a picture that comes late has the age that it has in the kernel", () => {
  const model = makeModel(1);
  const live = new LiveView(model);
  const now = Date.now() / 1000;
  model.say({ kind: "beat", version: 1, at: now }); // the delay of this one is the least
  const prompt = live.truthAt;
  assert.ok(Math.abs(prompt - Date.now()) < 500);
  model.say({ kind: "delta", version: 2, delta: {}, at: now - 30 });
  assert.equal(live.truthAt, prompt); // nothing newer is known
  model.say({ kind: "delta", version: 3, delta: {}, at: now + 60 }); // the clock was set forward, or the page's back
  assert.ok(Math.abs(live.truthAt - Date.now()) < 500);
});

test("the clock of the kernel is known by the least delay, and followed slowly where it is set back", () => {
  let now = 1000;
  const clock = new KernelClock(() => now);
  assert.equal(clock.pageTime(400), 1000); // 600 apart
  now = 2000;
  assert.ok(Math.abs(clock.pageTime(1300) - 1910) < 0.1); // 100 late, and 1 % of a second less sure
  now = 1e6;
  assert.ok(clock.pageTime(now - 9000) > now - 1); // an hour later a clock that is 9 s behind is the kernel's
});

test("the page reports the version that it has, once a second at most", () => {
  const model = makeModel(1);
  const live = new LiveView(model);
  const say = (version) => model.say({ kind: "delta", version, delta: {} });
  say(2);
  say(3);
  assert.deepEqual(plain(model.sent), [{ kind: "seen", version: 2, milliseconds: 0, late: 0 }]);
  live.reported.at = 0; // a second later
  live.reportVersion();
  live.reportVersion();
  assert.deepEqual(plain(model.sent).map(({ version }) => version), [2, 3]);
});

test("a model whose class refuses messages has them handled by the base class", () => {
  class Base { _handle_comm_msg(message) { this.got = message; } }
  class Refuses extends Base { _handle_comm_msg() { throw new Error("Failed to initialize model."); } }
  const state = {};
  const model = Object.assign(new Refuses(), { get: () => state, comm: { on_msg(call) { this.call = call; } } });
  receiveAgain({ _modelsSync: new Map([["id", model]]) }, state);
  model.comm.call("news");
  assert.equal(model.got, "news");
  receiveAgain({}, state); // a manager that lists no models
});

test("each state has a chip and a tooltip", () => {
  for (const kind of ["live", "late", "paused", "stopped", "record", "restarted", "gone", "cut", "failed"]) {
    const [text, title] = STRINGS.common.states[kind];
    assert.ok(text.length < 20 && title.endsWith("."), kind);
  }
});

// A cell's outputs as JupyterLab's model has them; `id` is the widget that one of them shows.
const outputs = (...ids) => {
  const list = ids.map((id) => ({ data: id ? { "application/vnd.jupyter.widget-view+json": { model_id: id } } : {} }));
  return { added: [], get length() { return list.length; }, get: (i) => list[i], add(one) { this.added.push(one); } };
};
const page = (...cells) => ({ context: { model: { cells } } });

test("a snapshot is added below the cell that shows the panel", () => {
  const [first, shows, later] = [outputs(null), outputs(null, "me"), outputs("other")];
  const notebook = page({ outputs: first }, {}, { outputs: shows }, { outputs: later });
  assert.ok(leave(notebook, "me", { "text/plain": "it" }));
  assert.deepEqual(plain(shows.added), [{ output_type: "display_data", data: { "text/plain": "it" }, metadata: {} }]);
  assert.deepEqual([first.added, later.added], [[], []]);
});

test("the snapshot of a panel in a tab is added below the last output", () => {
  const [last, empty] = [outputs("other"), outputs()];
  assert.ok(leave(page({ outputs: outputs(null) }, { outputs: last }, { outputs: empty }), "me", {}));
  assert.equal(last.added.length, 1);
  assert.equal(empty.added.length, 0);
});

test("a front end that does not show pages its notebook leaves the snapshot to the kernel", () => {
  assert.deepEqual(plain(outputsOf(undefined)), []);
  assert.deepEqual(plain(outputsOf({ kernel: KERNEL })), []);
  assert.ok(!leave({}, "me", {}));
});
