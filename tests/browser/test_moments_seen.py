"""At 20 random moments held by `%%step`, what each panel has drawn in JupyterLab is what all members' tables say."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from drawn import CONTEXTS, STEPS, contexts, latest_step
from lab import SECONDS

from rpcbench.telemetry.views import rref_view

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(600)]

MOMENTS = 20
START = "%load_ext rpcbench\n%cluster start 2"
PROGRAM = """import random, threading
import torch
import rpcbench.autograd as dist_autograd
import rpcbench.rpc as rpc
from rpcbench.runtime.current import current_agent
from rpcbench.pipeline import Pipeline, split

agent, over, rounds, wrong = current_agent(), threading.Event(), [], []
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
pipe = Pipeline(split(model, ["worker1", "worker2"]), microbatches=2, loss_fn=torch.nn.functional.cross_entropy)

def fetch(rref):
    return rref.to_here(timeout=0)

def there_and_on(x, to):
    return rpc.rpc_sync(to, torch.mul, (x, 2.0), timeout=0) * x

def share(dice):
    a, b = dice.sample(["worker1", "worker2"], 2)
    rref = rpc.remote(a, torch.ones, (2,), timeout=0)
    rpc.rpc_sync(b, fetch, (rref,), timeout=0)

def backward(dice):
    a, b = dice.sample(["worker1", "worker2"], 2)
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [rpc.rpc_sync(a, there_and_on, (x, b), timeout=0).sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [4.0, 4.0]

def train(dice):
    with pipe.batch(torch.rand(4, 4), torch.zeros(4, dtype=torch.long)):
        pass

def go_on(deed, dice):
    try:
        while not over.is_set():
            deed(dice)
            rounds.append(deed.__name__)
    except BaseException as error:
        wrong.append(repr(error))

def own():
    return current_agent().tables()

def everywhere():  # the bench's own calls: a stepper lets them pass
    asked = {i: agent.call(i, own, own=True) for i in (1, 2)}
    return {0: own(), **{i: one.wait() for i, one in asked.items()}}

def held():
    return [(row.sender, row.to, row.kind) for row in stepper.held]

def some_steps():
    for _ in range(dice.randint(1, 8)):
        row = dice.choice(stepper.wait())
        try:
            dice.choices([stepper.deliver, stepper.delay], [5, 1])[0](row.n)
        except ValueError:  # a member has told of it twice over meanwhile
            pass"""
PANELS = ("rrefs", "autograd", "pipeline", "messages")
STEP = """%%step
for seed, deed in enumerate([share, backward, train]):
    threading.Thread(target=go_on, args=(deed, random.Random(seed))).start()"""

RREFS = """() => Object.fromEntries([...document.querySelectorAll('[data-rref]')].map(
  one => [one.dataset.rref, one.querySelector('title').textContent.split('\\n')]))"""
MEANING = {
    "confirmed": "confirmed by the owner", "pending": "waits for the owner's confirmation",
    "deleting": "being deleted", "listed": "known to the owner only",
}  # fmt: skip
MESSAGES = """() => [...document.querySelectorAll('[data-message]')].map(
  one => [one.dataset.message, one.dataset.state, one.dataset.kind])"""
NAMES = ("notebook", "worker1", "worker2")
ALL_IN_SIGHT = ".rb-panel .rb-body { max-height: none !important; }"


def rrefs(tables):
    """What each RRef's row says in words, told by the tables."""
    members = {i: {"name": NAMES[i], "id": i, "incarnation": 0, "state": "up", "left_out": 0} for i in tables}
    view = rref_view({i: {**members[i], "tables": own} for i, own in tables.items()})
    found = {}
    for key, row in view["rrefs"].items():
        kind = f" ({row['type']})" if row["type"] else ""
        forks = [fork for fork in view["forks"].values() if fork["rref"] == key]
        users = {f"{fork['fork']} at {NAMES[fork['holder']]}: {MEANING[fork['state']]}" for fork in forks}
        state = "on its way" if row["state"] == "unlisted" else row["state"]
        found[key] = f"RRef {key}{kind}, {state}, owned by {NAMES[row['owner']]}", users
    return found


class Moment:
    """What the page and the kernel say, looked at one after the other."""

    def __init__(self, notebook):
        page = notebook.page
        self.tables, self.held = notebook.value("(everywhere(), held())")
        self.drawn = {"autograd": page.evaluate(CONTEXTS), "pipeline": page.evaluate(STEPS)}
        rows = page.evaluate(RREFS).items()
        self.drawn["rrefs"] = {key: (lines[0], {line for line in lines if " at " in line}) for key, lines in rows}
        self.messages = {key: (state, kind) for key, state, kind in page.evaluate(MESSAGES)}
        going = [(key, kind) for key, (state, kind) in self.messages.items() if state != "received"]
        self.drawn["messages"] = Counter((*_ends(key), kind) for key, kind in going)

    def told(self):
        held, told = Counter(tuple(row) for row in self.held), contexts(self.tables)  # the panel shows one of these
        return {
            "autograd": {key: told.get(key) for key in self.drawn["autograd"]}, "pipeline": latest_step(self.tables),
            "rrefs": rrefs(self.tables), "messages": held,
        }  # fmt: skip


def _ends(key):
    return [NAMES[int(end)] for end in key.partition(".")[0].split(">")]


def agreed(notebook, moment):
    """The moment at which all panels show what the tables say: what has been let go is still being told of."""
    deadline = time.monotonic() + SECONDS
    while True:
        now = Moment(notebook)
        told = now.told()
        if now.drawn == told or time.monotonic() > deadline:
            for name in PANELS:
                assert now.drawn[name] == told[name], f"{name} at moment {moment}"
            return now


@pytest.mark.long
def test_what_is_drawn_is_what_the_tables_say_at_each_held_moment(show):
    sources = [START, PROGRAM, STEP, *(f"%panel {name}" for name in PANELS)]
    notebook = show(sources, "moments.ipynb", height=6000)
    page = notebook.page
    page.add_style_tag(content=ALL_IN_SIGHT)
    notebook.run_to_end(START, PROGRAM, *sources[3:], STEP)
    for name in PANELS:
        page.locator(f".rb-{name} .rb-stats").wait_for()
    live = page.locator(".rb-pipeline button").filter(has_text="Live cursor")
    live.evaluate("one => one.click()")  # there is no step yet, so it is not in sight
    notebook.value("stepper.is_on", after="stepper, dice = _, random.Random(7)")
    seen, gone = Counter(), set()
    for moment in range(MOMENTS):
        notebook.value("some_steps()")
        now = agreed(notebook, moment)
        assert {now.messages[key][0] for key in gone} <= {"received"}, "what has come stays so"
        gone |= {key for key, (state, _) in now.messages.items() if state == "received"}
        seen.update({name: len(found) for name, found in now.drawn.items()})
        seen["under way"] += now.drawn["messages"].total()
        seen["ops"] += len(now.drawn["pipeline"]["ops"])
    assert min(seen[name] for name in ("rrefs", "autograd", "messages", "under way", "ops")) > 0
    assert notebook.value("stepper.delivered") > MOMENTS
    notebook.value("over.set(), stepper.go()")
    assert notebook.value("wrong") == []
    assert notebook.errors() == []
