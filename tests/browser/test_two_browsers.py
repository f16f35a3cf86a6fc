"""Two browsers on one notebook: whichever of them runs a cell, all panels of both show the same, and that moves."""

from __future__ import annotations

import time

import pytest
from lab import SECONDS

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

PANELS = ("rrefs", "autograd", "pipeline", "messages")
START = "%load_ext rpcbench\n%cluster start 2"
MAKE = """import pathlib, time
import torch
import rpcbench.autograd as dist_autograd
import rpcbench.rpc as rpc
from rpcbench.pipeline import Pipeline, split

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
pipe = Pipeline(split(model, ["worker1", "worker2"]), microbatches=2, loss_fn=torch.nn.functional.cross_entropy)
kept = []

def share():
    kept.append(rpc.remote("worker1", torch.ones, (2,)))
    rpc.rpc_sync("worker2", rpc.RRef.to_here, (kept[-1],))

def backward(context):
    x = torch.ones(2, requires_grad=True)
    dist_autograd.backward(context, [rpc.rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])"""
CHANGE = """share()
with pipe.batch(torch.rand(4, 4), torch.zeros(4, dtype=torch.long)):
    pass
with dist_autograd.context() as context:
    backward(context)
    print('it', 'waits')
    while not pathlib.Path('go').exists():
        time.sleep(0.02)
    pathlib.Path('go').unlink()"""
ALL_IN_SIGHT = ".rb-panel .rb-body { max-height: none !important; }"

# All that a panel draws: kinds, colours, data and words of its nodes. Not where they lie: a place that was free when a
# row came is its place, so that depends on the frames that a browser has painted; nor ages, which each browser counts.
DRAWN = """name => [...document.querySelectorAll(`.rb-${name} :is(.rb-body, .rb-stats, .rb-legend) *`)].map(node => {
  const told = [...node.attributes].filter(one => /^(data|aria)-/.test(one.name));
  const kind = [...node.classList].filter(one => one !== 'rb-new').sort().join('.');
  const words = [...node.childNodes].filter(one => one.nodeType === 3).map(one => one.data).join('');
  const age = node.classList.contains('rb-age');
  return [node.localName, kind, ...told.map(one => `${one.name}=${one.value}`), age ? '' : words].join(' ');
}).sort()"""


def drawn(notebook):
    return {name: notebook.page.evaluate(DRAWN, name) for name in PANELS}


def agreed(one, other, before):
    """What both show, once that is the same and each panel shows another thing than before."""
    deadline = time.monotonic() + SECONDS
    while True:
        now, there = drawn(one), drawn(other)
        moved = [name for name in PANELS if now[name] != before.get(name)]
        if (now == there and len(moved) == len(PANELS)) or time.monotonic() > deadline:
            for name in PANELS:
                assert now[name] == there[name], name
            assert moved == [*PANELS]
            return now
        one.page.wait_for_timeout(50)  # both pages go on


@pytest.mark.long
def test_two_browsers_on_one_notebook_show_the_same(lab, show):
    sources = [START, MAKE, CHANGE, *(f"%panel {name}" for name in PANELS)]
    one = show(sources, "two.ipynb", height=6000)
    one.run_to_end(START, MAKE, *sources[3:])
    other = lab.beside(one)
    for each in (one, other):
        each.page.add_style_tag(content=ALL_IN_SIGHT)
        for name in PANELS:
            each.page.locator(f".rb-{name} .rb-stat").first.wait_for()
    seen = {}
    for who in (one, other, one):
        who.run(CHANGE)
        who.output(CHANGE).filter(has_text="it waits").wait_for()
        seen = agreed(one, other, seen)
        (lab.folder / "go").touch()
        who.ended(CHANGE)
    rrefs = {row for row in seen["rrefs"] if "data-rref" in row}
    assert len(rrefs) == one.page.locator("[data-rref]").count() >= one.value("len(kept)") == 3
    assert one.errors() == other.errors() == []
