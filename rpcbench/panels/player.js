// Plays a record in one panel, in a page of its own, without a kernel and without requests to any host.
// The page, made by `rpcbench.panels.replay`, also contains the panel's drawing code and the record: the delta of the view for
// each frame. This text is in a block behind the drawing code and uses the names of `common.js`.

const MILLISECONDS = 200; // per frame

// Returns the views of all frames. Rows that do not change are the same objects, so a panel draws only changed rows.
function allViews(frames) {
  const views = [];
  for (const { delta } of frames) views.push(applyDelta(views.at(-1) ?? {}, delta));
  return views;
}

// Stands in for the model of the panel's widget; `show` makes the panel draw a view.
class PlayerModel {
  constructor(view) {
    this.listeners = {};
    this.state = { version: 1, view };
  }

  get(name) {
    return { state: this.state, phase: { name: "record", at: 0 } }[name] ?? "";
  }

  on(name, listener) {
    (this.listeners[name] ??= []).push(listener);
  }

  send() {}

  show(view) {
    this.state = { version: this.state.version + 1, view };
    for (const listener of this.listeners["change:state"] ?? []) listener();
  }
}

// Returns the text of the player's status: the time of a frame, and its name if it has one.
function timeText({ frames, seconds }, at) {
  const { time, name } = frames[at];
  const write = (value) => (value < 60 ? `${value.toFixed(2)} s` : formatMinutes(value, true));
  return `${write(time)} of ${write(seconds)}${name ? `, ${name}` : ""}`;
}

// Adds the panel, with a toolbar above it, to the element `parent`. It opens at the last frame, so a page that is not
// played shows the whole record.
function play(record, widget, parent) {
  const { frames } = record;
  const views = allViews(frames);
  const last = frames.length - 1;
  const model = new PlayerModel(views[last]);
  const button = (text, onClick) => {
    const node = html("button", { type: "button" }, text);
    node.addEventListener("click", onClick);
    return node;
  };
  let [at, timer] = [last, 0];
  const range = html("input", { type: "range", min: 0, max: last, step: 1, "aria-label": "frame" });
  const status = html("span", { role: "status" });
  const go = (frame) => {
    at = Math.min(last, Math.max(0, frame));
    range.value = at;
    set(range, { "aria-valuetext": timeText(record, at) });
    status.textContent = timeText(record, at);
    model.show(views[at]);
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    start.textContent = "Play";
  };
  const start = button("Play", () => {
    if (timer) return stop();
    if (at === last) go(0);
    start.textContent = "Pause";
    timer = setInterval(() => (at < last ? go(at + 1) : stop()), MILLISECONDS);
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
  bar.append(start, button("Step back", step(-1)), button("Step", step(1)), range, status);
  const el = html("div");
  parent.append(bar, el);
  if (record.note) parent.append(html("p", { class: "rb-player-note" }, record.note));
  widget.initialize({ model });
  widget.render({ model, el });
  go(last);
}
