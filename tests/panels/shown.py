"""One panel in a page, without a kernel, and a world in which everything happens that a panel can show."""

from __future__ import annotations

import json
import re

from pictures import (
    ask,
    compare,
    flow,
    gpipe,
    job,
    launch,
    logged,
    meet,
    own,
    ran,
    record,
    run_backward,
    sample,
    say,
    send,
    tell,
    use,
    value,
    watch,
    world,
)

from rpcbench.panels import ALL_PANELS, PANELS
from rpcbench.telemetry.views import diff_views

TABLES = ("workers", "progress", "shards")
OTHERS = ("compare", "metrics", "resources", "traffic", "logs")
PICTURES = [name for name in PANELS if name not in (*TABLES, *OTHERS)]  # drawn as one SVG of workers
NASTY = ["notebook", "<img src=x onerror='window.hurt=1'>", "</text><script>window.hurt=1</script>", "&amp;\"'" * 20]


class Shown:
    """One panel in a page, shown a world after another as the kernel would."""

    def __init__(self, page, name):
        self.page = page
        self.kind = ALL_PANELS[name]
        self.index = self.version = 0
        self.view = {}

    def open(self, at, version=1):
        self.version = version
        self.view = self.kind.look(at)
        state = {"version": version, "view": self.view}
        code = [str(self.kind._esm), str(self.kind._css)]
        self.index = self.page.evaluate("([...all]) => open_(...all)", [*code, state])
        self.render()

    def render(self):
        self.page.evaluate("view", self.index)

    def move(self, world, **more):
        """Send the delta to this world, in a message with `more`."""
        self.version += 1
        view = self.kind.look(world)
        delta = json.loads(json.dumps(diff_views(self.view, view)))
        self.view = view
        self.hear({"kind": "delta", "version": self.version, "delta": delta, **more})

    def hear(self, message):
        self.page.evaluate("([i, m]) => { models[i].say('msg:custom', m); return drawn(); }", [self.index, message])

    def whole(self, version, view):
        state = {"version": version, "view": view}
        self.page.evaluate("([i, s]) => { models[i].change('state', s); return drawn(); }", [self.index, state])

    def sent(self, kind):
        """What it has sent of this kind. Its reports, as of the picture that it has seen, come with the time."""
        return [one for one in self.page.evaluate("sent") if one["kind"] == kind]

    def count(self, selector):
        return self.page.locator(selector).count()

    def texts(self, selector):
        return self.page.locator(selector).all_text_contents()


def settled(locator):
    """Inner markup without the class that lets new nodes fade in."""
    return re.sub(r' class="(?:rb-new)?"| ?rb-new| (?=")', "", locator.inner_html())


def busy_world(names=None):
    """The notebook and three workers with RRefs in every state, one context in backward, and a running step."""
    at = world(3, names)
    for worker in (1, 2, 3):
        own(at, worker, f"0.{2 * worker}", "Linear")
        use(at, 0, f"0.{2 * worker + 1}", f"0.{2 * worker}", worker)
    own(at, 2, "1.7")
    use(at, 1, "1.8", "1.7", 2)
    use(at, 3, "1.9", "1.7", 2, "pending", parent=1)
    own(at, 3, "0.90", failed=True)
    use(at, 0, "0.91", "0.90", 3, "deleting")
    record(at, 1 << 48, [(m, 1, 2) for m in range(8)] + [(8 + m, 2, 3) for m in range(8)], {0: 0, 1: 4, 2: 4, 3: 2})
    for worker in (1, 2, 3):
        run_backward(at, 1 << 48, "1.0", worker, 8, 2 * worker)
    end = gpipe(at, 4, 3, 8, 100.0)
    gpipe(at, 5, 3, 8, end + 0.01, until=end + 0.05)
    send(at, 1, 2, "Call", 50.0, label=NASTY[1], call=1, rrefs=["1.7"], bytes=2_500)
    send(at, 2, 1, "Result", 50.001, took=0.003, call=1)
    send(at, 2, 3, "Gradients", 50.002, took=None, context=1 << 48, label=NASTY[2])
    send(at, 3, 3, "Create", 50.003, rrefs=["0.90"])
    meet(at, 1, {1: 50.0015, 2: 50.004}, None, NASTY[2], shape=NASTY[1])
    for worker in (1, 2, 3):
        watch(at, worker, worker - 1, 3, steps=2, gathered=384, most=384, groups=[[worker < 3, 4]])
    maps = [[[n], [2, 2], [[0, 40 * n], [100, 5]]] for n in (1, 2)]
    compare(
        at, value("initial", "up.weight"), value("forward", "up", "wrong", part=NASTY[1], maps=maps),
        value("forward", NASTY[2], "not there", ranks=[], errors=[]), value("forward", "", "cannot tell"), first="1",
    )  # fmt: skip
    name = at[1]["name"]
    tell(at, 1, cells=2, waiting=3, busy=1, queued=4, cpu=1.5, peers={"0": [1500, 12], "2": [4_200_000, 0]})
    tell(at, 2, 3)
    launch(at, 1, name, log=f"first line\n{name} says <b>")
    launch(at, 3, at[3]["name"], "killed by SIGKILL")
    job(at, 3, NASTY[1], note=NASTY[2])
    ran(at, 2, code=NASTY[1])
    for worker in (1, 2, 3):
        logged(at, worker, NASTY[1], [0.5, 0.25, float("nan") if worker == 3 else 0.2])
    for second in range(20):
        sample(at, 1_800_000_000 + second, {0: 0.1, 1: 1.5, 2: 0.2 * (second % 5)}, began=(1,) if second == 9 else ())
    flow(at, 0, {1: (1000, 900, 50_000, 0), 2: (0, 0, 400, 0)})
    flow(at, 1, {2: (4_200_000, 2_000_000, 30_000_000, 29_000_000)})
    flow(at, 3, {0: (0, 0, 700, 0)}, silent=True)
    for worker in (1, 2, 3):
        say(at, worker, f"{at[worker]['name']} says <b>", NASTY[1], NASTY[2])
    say(at, 3, f"{at[3]['name']} was lost: killed by SIGKILL", kind="event")
    ask(at, "restart", name)
    ask(at, "interrupt", name, f"RpcError: {name}")
    return at
