// Plays a record in one panel, in a page of its own: no kernel, and nothing is asked of anybody. The page has the common
// part and the panel's own, as `widget`, and what `rpcbench.panels.replay` has worked out: a view's difference per frame.

const MILLISECONDS = 200;

// All views, one per frame; rows that stay are the same objects, so that a panel draws only what has changed.
function viewsOf(frames) {
  const views = [];
  for (const { delta } of frames) views.push(patched(views.at(-1) ?? {}, delta));
  return views;
}

// What a panel takes for the model of its widget: it goes to whatever view it is told to.
class Told {
  constructor(view) {
    this.ears = {};
    this.state = { version: 1, view };
  }

  get(name) {
    return name === "state" ? this.state : "";
  }

  on(name, ear) {
    (this.ears[name] ??= []).push(ear);
  }

  send() {}

  show(view) {
    this.state = { version: this.state.version + 1, view };
    for (const ear of this.ears["change:state"] ?? []) ear();
  }
}

function moment({ frames, seconds }, at) {
  const { time, name } = frames[at];
  return `${time.toFixed(2)} s of ${seconds.toFixed(2)} s${name ? `, ${name}` : ""}`;
}

function play(record, widget, place) {
  const { frames } = record;
  const views = viewsOf(frames);
  const model = new Told(views[0]);
  const button = (words, act) => {
    const made = html("button", { type: "button" }, words);
    made.addEventListener("click", act);
    return made;
  };
  let [at, timer] = [0, 0];
  const range = html("input", { type: "range", min: 0, max: frames.length - 1, step: 1, "aria-label": "frame" });
  const said = html("span", { role: "status" });
  const go = (frame) => {
    at = Math.min(frames.length - 1, Math.max(0, frame));
    range.value = at;
    set(range, { "aria-valuetext": moment(record, at) });
    said.textContent = moment(record, at);
    model.show(views[at]);
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    start.textContent = "Play";
  };
  const start = button("Play", () => {
    if (timer) return stop();
    if (at === frames.length - 1) go(0);
    start.textContent = "Pause";
    timer = setInterval(() => (at < frames.length - 1 ? go(at + 1) : stop()), MILLISECONDS);
  });
  const step = (by) => () => {
    stop();
    go(at + by);
  };
  range.addEventListener("input", () => {
    stop();
    go(Number(range.value));
  });
  const bar = html("div", { class: "rb-player", role: "toolbar", "aria-label": "Record" });
  bar.append(start, button("Step back", step(-1)), button("Step", step(1)), range, said);
  const el = html("div");
  place.append(bar, el);
  if (record.note) place.append(html("p", { class: "rb-player-note" }, record.note));
  widget.initialize({ model });
  widget.render({ model, el });
  go(0);
}
