"""How often a browser draws a panel anew: with 1,000 rows in it, of which some change 20 times a second.

The panel's own code runs in a headless Chromium, in a page that stands in for the notebook. Frames of the page are
counted: while a panel draws, no other frame comes.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from benchmarks.pairs import BenchError
from rpcbench.base.ids import Row, Table
from rpcbench.panels import PANELS
from rpcbench.telemetry.views import World, diff_views

ROWS = 1000
WORKERS = 8
_CHANGED = 20  # rows in each update
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]

# A stand-in for the widget model that a notebook's front end gives to the module.
HOST = """
window.models = [];
window.sent = [];
window.open_ = async (esm, css, state) => {
  document.head.append(Object.assign(document.createElement('style'), {textContent: css}));
  const module = await import(URL.createObjectURL(new Blob([esm], {type: 'text/javascript'})));
  const ears = {}, data = {state, problem: '', acts: true};
  const model = {
    get: name => data[name], off() {}, send: message => window.sent.push(message),
    on: (name, ear) => (ears[name] ??= []).push(ear),
    say: (name, value) => (ears[name] ?? []).forEach(ear => ear(value)),
    change: (name, value) => { data[name] = value; model.say('change:' + name); },
  };
  model.widget = module.default();
  await model.widget.initialize({model});
  return window.models.push(model) - 1;
};
window.view = async index => {
  const el = document.createElement('div');
  document.body.replaceChildren(...document.body.children, el);
  window.close_ = await window.models[index].widget.render({model: window.models[index], el});
  await window.drawn();
};
window.drawn = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())));
"""
_PLAY = """([deltas, pause]) => new Promise(done => {
  let [at, frames, runs] = [0, 0, true];
  const begin = performance.now();
  const count = () => { frames += 1; if (runs) requestAnimationFrame(count); };
  requestAnimationFrame(count);
  const next = () => {
    if (at === deltas.length) {
      runs = false;
      return requestAnimationFrame(() => done([frames, (performance.now() - begin) / 1000]));
    }
    models[0].say('msg:custom', { kind: 'delta', version: at + 2, delta: deltas[at] });
    at += 1;
    setTimeout(next, Math.max(0, begin + at * pause - performance.now()));
  };
  next();
})"""


def obstacle() -> str:
    """Why nothing can be measured here, in words; or ""."""
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    return "" if CHROMIUM else "no Chromium: set CHROMIUM or put it on PATH"


def frames(name: str, updates: int, per_second: int) -> float:
    """Frames a second of one panel, while so many updates come to it. BenchError where its code fails."""
    from playwright.sync_api import sync_playwright

    kind = PANELS[name]
    views = [kind.look(world) for world in worlds(name, updates)]
    deltas = [diff_views(before, after) for before, after in pairwise(views)]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1000, "height": 700})
            wrong: list[str] = []
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.set_content("<!doctype html><body></body>")
            page.evaluate(HOST)
            state = {"version": 1, "view": views[0]}
            page.evaluate("all => open_(...all)", [str(kind._esm), str(kind._css), state])
            page.evaluate("view", 0)
            shown, seconds = page.evaluate(_PLAY, [deltas, 1000 / per_second])
        finally:
            browser.close()
    if wrong:
        raise BenchError(f"the panel {name} has failed in the browser: {wrong[0]}")
    return float(shown / seconds)


def worlds(name: str, updates: int) -> Iterator[World]:
    """The same world at so many moments and one more, with `ROWS` rows of what the panel shows."""
    draw = random.Random(name)
    members = range(WORKERS + 1)
    tables: dict[int, dict[str, Table]] = {i: {} for i in members}
    rows = list(range(ROWS))
    for number in rows:
        _MAKE[name](tables, number, 0)
    for moment in range(updates + 1):
        if moment:
            for number in draw.sample(rows, _CHANGED):
                _MAKE[name](tables, number, moment)
        yield {i: _member(i, tables[i]) for i in members}


def _member(i: int, tables: dict[str, Table]) -> dict[str, Any]:
    name = f"worker{i}" if i else "notebook"
    own = {table: dict(rows) for table, rows in tables.items()}
    return {"name": name, "id": i, "incarnation": 0, "state": "up", "tables": own, "left_out": 0}


def _put(tables: dict[int, dict[str, Table]], worker: int, table: str, key: str, row: Row) -> None:
    tables[worker].setdefault(table, {})[key] = row


def _rref(tables: dict[int, dict[str, Table]], number: int, moment: int) -> None:
    """An RRef with a user; its state changes."""
    owner, rref, fork = 1 + number % WORKERS, f"0.{2 * number}", f"0.{2 * number + 1}"
    forks = [{"fork": fork, "holder": 0}]
    failed = bool(moment % 2)
    row = {"rref": rref, "ready": not failed, "failed": failed, "type": "Tensor", "forks": forks, "made": 1.0}
    row |= {"size": 4096, "cell": "", "number": None}
    user = {"rref": rref, "fork": fork, "owner": owner, "parent": None, "state": "confirmed", "children": []}
    _put(tables, owner, "owned", rref, row)
    _put(tables, 0, "users", fork, {**user, "type": "Tensor"})


def _context(tables: dict[int, dict[str, Table]], number: int, moment: int) -> None:
    """A tenth of a context: one of ten messages, in a pass whose count goes down."""
    number //= 10
    here, there, key = 0, 1 + number % WORKERS, str(number)
    messages = [10 * number + i for i in range(10)]
    one = {"pass": "0.1", "state": "running", "needed": 10, "arrived": moment % 11, "waiting": 1}
    row = {"context": number, "known": [], "gradients": 4, "passes": [one]}
    _put(tables, here, "contexts", key, {**row, "sends": [{"message": m, "to": there} for m in messages], "recvs": []})
    _put(
        tables, there, "contexts", key, {**row, "sends": [], "recvs": [{"message": m, "from": here} for m in messages]}
    )
    leaves = [{"name": f"layer{i}.weight", "shape": "[64, 64]", "bytes": 16384} for i in range(4)]
    cut = [{"pass": "0.1", "regions": 10, "ran": moment % 11}]
    _put(tables, there, "graphs", key, {"context": number, "leaves": leaves, "more": 0, "passes": cut})


def _operation(tables: dict[int, dict[str, Table]], number: int, moment: int) -> None:
    """An operation of one step; it takes longer each time."""
    worker, place = 1 + number % WORKERS, number // WORKERS
    begin = place + 0.0005 * moment
    row = {"step": 1, "worker": worker, "stage": worker - 1, "op": "FB"[place % 2], "microbatch": place // 2}
    times = {"begin": begin, "end": begin + 0.8, "bytes": 4096, "held": 4096 * (place % 5), "failed": False}
    _put(tables, worker, "ops", f"s1.w{worker}.{place}", {**row, **times})
    part = {"step": 1, "worker": worker, "workers": list(range(1, WORKERS + 1)), "plan": [], "ideal": 0.2}
    _put(tables, worker, "steps", f"s1.w{worker}", {**part, "state": "running"})


_MAKE = {"rrefs": _rref, "autograd": _context, "pipeline": _operation}
SHOWN = tuple(_MAKE)
