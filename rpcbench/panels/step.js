// Held messages: a list in the order in which they would go, each with what can be done with it. Keys on a message:
// Enter delivers it, Delete drops it, l puts it behind the others, arrows go up and down.

let model; // the widget's, once it is drawn; the module belongs to one panel

const deeds = [
  ["deliver", "Deliver", "Enter", "Let this message go on"],
  ["drop", "Drop", "Delete", "Lose this message, as a bad line would"],
  ["delay", "Later", "l", "Put this message behind all others"],
];

const button = (words, hint, deed) => {
  const made = html("button", { type: "button", class: "rb-do", title: hint }, words);
  made.addEventListener("click", deed);
  return made;
};

const about = ({ n, sender, to, kind, label }) => `${n}: ${kind}${label ? ` ${label}` : ""} from ${sender} to ${to}`;

function item(row, ask) {
  const what = html("span", { class: `rb-what rb-is-${FAMILY[row.kind] ?? "call"}` }, row.kind);
  const made = html(
    "li",
    { class: "rb-held", tabindex: "-1", "data-n": row.n, "aria-label": about(row) },
    html("span", { class: "rb-n" }, String(row.n)),
    html("span", { class: "rb-who" }, row.sender, html("span", { class: "rb-to" }, " → "), row.to),
    what,
    html("span", { class: "rb-label" }, short(row.label, 40)),
    html("span", { class: "rb-about" }, short(row.about, 80)),
    html("span", { class: "rb-deeds" }, ...deeds.map(([kind, word, , hint]) => button(word, hint, () => ask(kind, row)))),
  );
  made.title = [about(row), row.about].filter(Boolean).join("\n");
  return made;
}

const FAMILY = {
  ForkRequest: "rref", ForkAccept: "rref", ChildAccept: "rref", UserDelete: "rref",
  Discover: "grad", Discovered: "grad", Gradients: "grad", Settled: "grad", WalkFailed: "grad", ReleaseContext: "grad",
  Attending: "grad", Result: "answer", Failure: "answer",
};

// Children in this order, moving none that stands right, so that the focus stays.
function arrange(list, nodes) {
  let at = list.firstChild;
  for (const node of nodes) {
    if (node === at) at = at.nextSibling;
    else list.insertBefore(node, at);
  }
}

const build = panel("step", "Held messages", (frame) => {
  const list = html("ol", { class: "rb-list", "aria-label": "Held messages, the next one first" });
  const said = html("p", { class: "rb-said", role: "status" });
  const bar = html("div", { class: "rb-bar", role: "toolbar", "aria-label": "Stepping" });
  const ask = (kind, row) => {
    said.textContent = `${{ deliver: "Delivered", drop: "Dropped", delay: "Put behind" }[kind]} ${about(row)}.`;
    model.send({ kind, n: row.n });
  };
  const buttons = [
    button("Deliver next", "Let the first message go on", () => first && ask("deliver", first)),
    button("A second passes", "Let a second pass for deadlines and retries", () => model.send({ kind: "time", seconds: 1 })),
    button("Let all go", "Hold nothing any more; clocks go again", () => model.send({ kind: "go" })),
  ];
  let first = null;
  let current = null; // the message that a Tab leads to
  bar.append(...buttons, said);
  frame.head.after(bar);
  frame.body.prepend(list);
  set(frame.body, { tabindex: null, "aria-label": "Held messages" });

  const items = () => [...list.children];
  const choose = (node, focus) => {
    current = node?.dataset.n ?? null;
    for (const one of items()) one.tabIndex = one === node ? 0 : -1;
    if (focus) node?.focus();
  };
  list.addEventListener("focusin", (event) => choose(event.target.closest("li"), false));
  list.addEventListener("keydown", (event) => {
    const node = event.target;
    if (node.localName !== "li" || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowDown: node.nextElementSibling, ArrowUp: node.previousElementSibling }[event.key];
    const deed = deeds.find(([, , key]) => key === event.key);
    if (deed) ask(deed[0], node.row_);
    else if (step) choose(step, true);
    if (deed || step) event.preventDefault();
  });

  return ({ stepper, held }) => {
    const { on, delivered, dropped, order } = stepper[0];
    const rows = order.map((n) => held[n]).filter(Boolean);
    const before = items();
    const inside = list.contains(document.activeElement) ? document.activeElement : null;
    const at = inside ? before.indexOf(inside.closest("li")) : -1;
    first = rows[0] ?? null;
    join(list, rows.map((row) => ({ key: row.n, parts: [row], row })), (_, { row }) => Object.assign(item(row, ask), { row_: row }));
    arrange(list, rows.map(({ n }) => list.children_.get(n).node));
    const now = items();
    if (inside && !now.some((node) => node.contains(document.activeElement))) {
      choose(list.contains(inside) ? inside.closest("li") : now[Math.min(at, now.length - 1)], true);
    } else choose(now.find((node) => node.dataset.n === current) ?? now[0], false);
    for (const one of buttons) one.disabled = !on;
    buttons[0].disabled = !rows.length;
    frame.say([rows.length, "held", rows.length ? "rb-wait" : ""], [delivered, "delivered"], [dropped, "dropped"]);
    const idle = on ? "Nothing is held now. Messages stop here as they come." : "All messages go on by themselves again.";
    frame.hint.textContent = rows.length ? "" : idle;
    frame.root.classList.toggle("rb-off", !on);
  };
});

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
