// The step panel: a list of held messages, in the order in which they would be delivered, with buttons for each message.
// Keys on a message: Enter delivers it, Delete drops it, l moves it behind the others, and the arrow keys move the focus.
// Guarantees: the focus stays on its message while others come and go. If that message is removed, the one in its place gets it.

let model; // the widget's model, set when the panel is rendered; the module belongs to one panel

// Actions on one message: the kind of the request, the label, the key, and the tooltip.
const actions = [
  ["deliver", "Deliver", "Enter", "Deliver this message"],
  ["drop", "Drop", "Delete", "Lose this message, as a bad network would"],
  ["delay", "Later", "l", "Move this message behind all others"],
];

const button = (text, hint, onClick) => {
  const node = html("button", { type: "button", class: "rb-do", title: hint }, text);
  node.addEventListener("click", onClick);
  return node;
};

const describe = ({ n, sender, to, words }) => `${n}: ${words} from ${sender} to ${to}`;

function listItem(row, send) {
  const words = html("span", { class: `rb-what rb-${row.family}` }, shorten(row.words, 60));
  const node = html(
    "li",
    { class: "rb-held", tabindex: "-1", "data-n": row.n, "aria-label": describe(row) },
    html("span", { class: "rb-n" }, String(row.n)),
    html("span", { class: "rb-who" }, row.sender, html("span", { class: "rb-to" }, " → "), row.to),
    words,
    html("span", { class: "rb-about" }, shorten(row.about, 80)),
    html("span", { class: "rb-deeds" }, ...actions.map(([action, text, , hint]) => button(text, hint, () => send(action, row)))),
  );
  node.title = [describe(row), row.about].filter(Boolean).join("\n");
  return node;
}

// Puts the children of a list in this order. A node that is in its place is not moved, as moving it would take its focus.
function reorder(list, nodes) {
  let at = list.firstChild;
  for (const node of nodes) {
    if (node === at) at = at.nextSibling;
    else list.insertBefore(node, at);
  }
}

const build = panel("step", "Held messages", (frame) => {
  const list = html("ol", { class: "rb-list", "aria-label": "Held messages, the next one first" });
  const status = html("p", { class: "rb-said", role: "status" });
  const bar = html("div", { class: "rb-bar", role: "toolbar", "aria-label": "Stepping" });
  const send = (kind, row) => {
    status.textContent = `${{ deliver: "Delivered", drop: "Dropped", delay: "Delayed" }[kind]} ${describe(row)}.`;
    model.send({ kind, n: row.n });
  };
  const buttons = [
    button("Deliver next", "Deliver the first message", () => first && send("deliver", first)),
    button("Advance 1 s", "Advance the clock by one second, for deadlines and retransmits", () => model.send({ kind: "time", seconds: 1 })),
    button("Release all", "Deliver all messages and hold no more; clocks run again", () => model.send({ kind: "go" })),
  ];
  let first = null;
  let current = null; // the number of the message that the Tab key leads to
  bar.append(...buttons, status);
  frame.head.after(bar);
  frame.body.prepend(list);
  set(frame.body, { tabindex: null, "aria-label": "Held messages" });

  const nodes = () => [...list.children];
  // Make a node the only one that the Tab key reaches, and focus it if wanted.
  const choose = (node, focus) => {
    current = node?.dataset.n ?? null;
    for (const one of nodes()) one.tabIndex = one === node ? 0 : -1;
    if (focus) node?.focus();
  };
  list.addEventListener("focusin", (event) => choose(event.target.closest("li"), false));
  list.addEventListener("keydown", (event) => {
    const node = event.target;
    if (node.localName !== "li" || event.ctrlKey || event.metaKey || event.altKey) return;
    const neighbour = { ArrowDown: node.nextElementSibling, ArrowUp: node.previousElementSibling }[event.key];
    const action = actions.find(([, , key]) => key === event.key);
    if (action) send(action[0], node.row_);
    else if (neighbour) choose(neighbour, true);
    if (action || neighbour) event.preventDefault();
  });

  return ({ stepper, held }) => {
    const { on, delivered, dropped, passed, order } = stepper[0];
    const rows = order.map((n) => held[n]).filter(Boolean);
    const before = nodes();
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    const at = focused ? before.indexOf(focused.closest("li")) : -1;
    first = rows[0] ?? null;
    join(list, rows.map((row) => ({ key: row.n, parts: [row], row })), (_, { row }) => Object.assign(listItem(row, send), { row_: row }));
    reorder(list, rows.map(({ n }) => list.children_.get(n).node));
    const now = nodes();
    if (focused && !now.some((node) => node.contains(document.activeElement))) {
      choose(list.contains(focused) ? focused.closest("li") : now[Math.min(at, now.length - 1)], true);
    } else choose(now.find((node) => node.dataset.n === current) ?? now[0], false);
    for (const one of buttons) one.disabled = !on;
    buttons[0].disabled = !rows.length;
    const clock = [`${passed} s`, "advanced", "", STRINGS.step.clock];
    frame.showStats([rows.length, "held", rows.length ? "rb-wait" : ""], [delivered, "delivered"], [dropped, "dropped"], clock);
    const idle = on ? "No messages are held now. New messages stop here." : "Messages are no longer held.";
    frame.hint.textContent = rows.length ? "" : idle;
    frame.root.classList.toggle("rb-off", !on);
  };
});

// The widget that `panel` makes, with a `render` that also keeps the model, to which the buttons send.
export default () => {
  const widget = build();
  return {
    ...widget,
    render(at) {
      model = at.model;
      return widget.render(at);
    },
  };
};
