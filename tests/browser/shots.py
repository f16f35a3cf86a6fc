"""The pictures of panels in the docs, taken in JupyterLab.

    PYTHONPATH=tests python tests/browser/shots.py docs/pictures
    PYTHONPATH=tests python tests/browser/shots.py docs/pictures --only messages training
    PYTHONPATH=tests python tests/browser/shots.py docs --only readme

Each panel once in the light theme and once in the dark one, of a cluster that is at work.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import nbformat
from lab import LESSON, Lab, Notebook, running
from playwright.sync_api import Page

README = Path(__file__).parents[2] / "README.md"
BARE = ("autograd", "pipeline")  # pictures without a theme in their names, if it is the light one
HIDE_LEFT = "jupyterapp.commands.execute('application:toggle-left-area')"
HIDE_STATUS = "jupyterapp.commands.execute('statusbar:toggle')"
THEME = "theme => jupyterapp.commands.execute('apputils:change-theme', {theme: `JupyterLab ${theme}`})"
CURVES = 15_000  # milliseconds in which the curves of the workers panel come to show something

# ---- programs; the first cell starts a cluster, and `cluster.workers` are its workers' names

SHARE = """import time, torch
import rpcbench.rpc as rpc
*others, last = cluster.workers
rows = [rpc.remote(others[i % len(others)], torch.ones, (250_000 * (1 + i),)) for i in range(len(others) + 2)]
model = rpc.remote("worker2", torch.nn.Linear, (512, 512))
shared = [rpc.rpc_sync(last, list, ([row],)) for row in rows[:2]]
keeper = rpc.remote(last, list, ([*rows[2:4], model],))
for each in (*rows, model, keeper):
    each.to_here()
busy = [rpc.rpc_async("worker2", time.sleep, (600,)) for _ in range(3)]"""
CELL = """%%remote worker1 --async
import time, torch
for epoch in range(600):
    torch.randn(500, 500).matrix_exp()
    time.sleep(0.3 + epoch % 9 / 10)"""
LOG = "_ = cluster.rpc_sync('worker3', print, ('loader: shard 7 of 12 is read',))"
LOSE = "import os, signal\nos.kill(cluster.pid(last), signal.SIGKILL)"

TALK = [
    """import torch, rpcbench.rpc as rpc, rpcbench.autograd as dist_autograd

def there_and_on(x, to, *rest):
    y = rpc.rpc_sync(to, there_and_on, (x, *rest)) if rest else rpc.rpc_sync(to, torch.mul, (x, 2.0))
    return y * x

first, *rest = cluster.workers[1:]""",
    "%panel messages",
    """x = torch.ones(1000, requires_grad=True)
rref = rpc.remote("worker1", torch.ones, (1000,))
with dist_autograd.context() as context_id:
    y = rpc.rpc_sync(first, there_and_on, (x, *rest))
    dist_autograd.backward(context_id, [(y * rpc.rpc_sync("worker1", torch.neg, (x,))).sum()])
rpc.rpc_sync(rest[-1], rpc.RRef.to_here, (rref,)).sum()
del rref""",
]

TOGETHER = [
    """%%remote all
import torch, rpcbench.distributed as dist
dist.init_process_group("gloo")
weights, slow = torch.ones(512, 512), dist.get_rank() == 1""",
    "%panel messages",
    """%%remote all
for step in range(4):
    for _ in range(40 if slow else 4 + dist.get_rank()):
        torch.mm(weights, weights)
    dist.all_reduce(weights)
    dist.broadcast(weights, 0)""",
    "import rpcbench\nrpcbench.collectives()",
]

# Each worker computes, sends to the next one, and keeps ever more; one is started again.
USE = [
    "%panel resources",
    "%panel traffic",
    """%%remote all --async
import contextlib, time, torch, rpcbench.rpc as rpc
rank = int(rpc.get_worker_info().name[-1])
held = []
for step in range(600):
    begin = time.process_time()
    while time.process_time() - begin < 0.15 * rank * (step // 6 % 2):
        torch.randn(200, 200).matrix_exp()
    with contextlib.suppress(Exception):
        rpc.rpc_sync(f"worker{rank % 4 + 1}", torch.neg, (torch.ones(30_000 * rank),))
    if step % 6 == 0:
        held.append(torch.ones(4_000_000))
    time.sleep(0.5)""",
    "cluster.restart('worker4')",
]
# Four ranks, of which one gets targets with much noise, later on.
LOGS = [
    "%panel metrics",
    """%%remote all
import rpcbench, torch
rank = int(__import__("rpcbench.rpc").rpc.get_worker_info().name[-1])
torch.manual_seed(rank)
model = torch.nn.Linear(8, 1)
for step in range(400):
    lr = 0.05 * min(1, (step + 1) / 80)
    noise = 3.0 if rank == 3 and step > 250 else 0.5
    x = torch.randn(64, 8)
    loss = (model(x) - x.sum(1, keepdim=True) - noise * torch.randn(64, 1)).square().mean()
    model.zero_grad()
    loss.backward()
    norm = model.weight.grad.norm()
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad
    rpcbench.log(loss=loss, lr=lr, grad_norm=norm)""",
]
USED = 25_000  # milliseconds before the restart, and after it

# FSDP times tensor parallel, stopped in the middle of a forward pass: one block and the root are gathered.
# A training loop, maps of which one fails and one still runs, and cells on the workers.
WORK = [
    "%panel progress",
    """import time, torch
from torch import nn
from rpcbench.pipeline import Pipeline, split

class Classifier(nn.Sequential):
    pass

model = Classifier(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
pipe = Pipeline(split(model, cluster.workers[:2]), microbatches=4, loss_fn=nn.functional.cross_entropy,
                optimizer=(torch.optim.Adam, {"lr": 0.01}))
batches = [(torch.randn(32, 16), torch.randint(4, (32,))) for _ in range(20)]
pipe.fit(batches, epochs=3, progress=False)""",
    """def load(shard):
    time.sleep(0.02)
    if shard == 17:
        raise ValueError(f"shard {shard} is empty")
    return shard

list(cluster.map(load, range(40), progress=False))""",
    "%%remote all\nimport time, torch\nx = torch.randn(500, 500)\ntime.sleep(1.3)",
    "%%remote worker2\ny = x @ torch.ones(3)",
    "%%remote worker1 worker3 --async\nfor epoch in range(60):\n    time.sleep(1)",
    """def score(seed):
    time.sleep(0.4)
    return seed

scores = cluster.map(score, range(100), progress=False, ordered=False)
for _ in range(37):
    next(scores)
import threading
threading.Thread(target=list, args=(scores,)).start()""",
]

SHARDED = [
    """%%remote all
import warnings, torch, rpcbench.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Embedding(96, 64), Block(), Block(), nn.Linear(64, 96, bias=False))
for block in model[1:3]:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.Adam(model.parameters())""",
    "%panel shards model",
    """%%remote all
for step in range(10):
    optimizer.zero_grad()
    model(torch.arange(96).view(8, 12)).square().mean().backward()
    optimizer.step()
model.unshard()
model[1].unshard()""",
]

# The wrong program of docs/compare.md.
COMPARED = [
    """import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

def step(model):
    loss = model(torch.ones(4, 8).cumsum(1)).square().mean()
    loss.backward()
    return loss

class Row(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight) + self.bias  # and no all_reduce

def make_by_hand(mesh):
    model, rank = make_model(), mesh.get_local_rank()
    first, second = model[0], model[2]
    first.weight.data, first.bias.data = first.weight.data.chunk(4)[rank], first.bias.data.chunk(4)[rank]
    second.weight.data = second.weight.data.chunk(4, 1)[rank]
    second.__class__ = Row
    return model""",
    "cluster.compare(reference=(make_model, step), parallel=(make_by_hand, step), mesh={'tp': 4})",
]

# Blocks with fully_shard, and tensor parallelism or none, on all meshes of 64 GPUs.
LOGGED = [
    "%panel logs",
    """%%remote all
import logging, sys, threading, time
log = logging.getLogger("train")
logging.basicConfig(stream=sys.__stderr__, force=True, format="%(levelname)s:%(name)s:%(message)s", level="INFO")
def train(step=0):
    time.sleep(0.5)
    for step in range(6):
        log.info(f"step {step} loss {1 / (step + 1):.3f}")
    log.warning("the loss of step 6 is high: 3.2")
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("step 7 failed")
threading.Thread(target=train).start()""",
]

PLANNED = """import torch, rpcbench
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def program(mesh):
    dp, tp = mesh["dp"].size(), mesh["tp"].size()
    if tp > 16:
        raise ValueError(f"16 heads do not go into {tp} pieces")
    blocks = [nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192)) for _ in range(36)]
    model = nn.Sequential(*blocks)
    for block in blocks:
        if tp > 1:
            parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if dp > 4:
            fully_shard(block, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(65536 // dp, 8192)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

layouts = rpcbench.plan(program, 64, "a100", tokens=65536)
layouts"""

# A pipeline of four stages, each sharded over two ranks.
SIMULATED = """import torch, rpcbench
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

def program(mesh):
    rank, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    layers = [nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)) for _ in range(3 + (rank == 2))]
    model = nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ends = [torch.ones(2048, 4096, requires_grad=True) for _ in range(2)]
    stage = PipelineStage(model, rank, stages, torch.device("cpu"), *ends, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 8, loss_fn=lambda y, target: (y - target).square().mean())

    def step():
        inputs = [torch.ones(8 * 2048, 4096)] if rank == 0 else []
        targets = {"target": torch.ones(8 * 2048, 4096)} if rank == stages - 1 else {}
        schedule.step(*inputs, **targets)
        optimizer.step()
        optimizer.zero_grad()

    return step

world = rpcbench.simulate(program, mesh={"pp": 4, "dp": 2}, hardware="h100")"""

# A backward pass that takes its time, and a moment in the middle of it. From then on the panel stands still.
BACKWARD = [
    "%panel autograd",
    """import time
import torch, rpcbench.rpc as rpc, rpcbench.autograd as dist_autograd

def forward(layer, x):
    x.register_hook(lambda gradient: time.sleep(0.8))
    return layer.local_value()(x)

layers = {worker: rpc.remote(worker, torch.nn.Linear, (8, 8)) for worker in cluster.workers}
scale = torch.ones(8, requires_grad=True)
with dist_autograd.context() as context_id:
    outputs = []
    for part in torch.rand(4, 8):
        for worker, layer in layers.items():
            part = rpc.rpc_sync(worker, forward, (layer, part * scale))
        outputs.append(part)
    dist_autograd.backward(context_id, [sum(outputs).sum()])""",
]
HALFWAY = """() => {
  const waiting = [...document.querySelectorAll('.rb-part')].filter(part => part.dataset.left > 0);
  const count = what => document.querySelectorAll(what).length;
  const good = waiting.length > 1 && 2 * count('.rb-block:is(.rb-ran, .rb-partly)') >= count('.rb-block');
  if (good) {
    window.goesOn = window.requestAnimationFrame;
    window.requestAnimationFrame = call => (call.name === 'paint' ? 0 : window.goesOn(call));
  }
  return good;
}"""
GO_ON = "() => { window.requestAnimationFrame = window.goesOn; }"


def lesson() -> nbformat.NotebookNode:
    """The first lesson without exercises."""
    notebook = nbformat.read(LESSON, 4)
    notebook.cells = [cell for cell in notebook.cells if not any(":" in tag for tag in cell.metadata.get("tags", ()))]
    return notebook


class Shots:
    """Runs programs in JupyterLab, and writes pictures to a folder."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder

    def open(self, workers: int, sources: list[str], height: int) -> Notebook:
        """A notebook in which the cluster has started."""
        start = f"%load_ext rpcbench\n%cluster start {workers}"
        notebook = self.lab.open((start, *sources), "panels.ipynb", width=1300, height=height)
        notebook.page.evaluate(HIDE_LEFT)
        self.run(notebook, start)
        return notebook

    def run(self, notebook: Notebook, *sources: str) -> None:
        notebook.run_to_end(*sources)

    def take(self, page: Page, name: str, what: str = "") -> None:
        """Write a picture in each theme."""
        page.evaluate("document.activeElement?.blur()")
        for theme in ("dark", "light"):  # the server keeps the last one
            page.evaluate(THEME, theme.title())
            page.locator(f"body[data-jp-theme-light={str(theme == 'light').lower()}]").wait_for(state="attached")
            page.locator("#jupyterlab-splash").wait_for(state="detached")  # it covers a page that changes its theme
            page.emulate_media(color_scheme=theme)
            file = f"{name}.png" if theme == "light" and name in BARE else f"{name}-{theme}.png"
            page.locator(what or f".rb-{name}").screenshot(path=self.folder / file, animations="disabled")


def of_workers(shots: Shots) -> None:
    """All that workers are often in, and the RRefs between them. The last one is lost."""
    panels = ["%panel rrefs", "%panel workers"]
    notebook = shots.open(4, [SHARE, CELL, LOG, *panels, LOSE], 2000)
    shots.run(notebook, SHARE, CELL, LOG, *panels)
    page = notebook.page
    page.locator("[data-rref]").nth(4).wait_for()
    shots.take(page, "rrefs")
    page.wait_for_timeout(CURVES)
    shots.run(notebook, LOSE)
    page.locator("tr[data-worker='4'][data-state='lost']").wait_for()
    page.locator("tr[data-worker='1'][data-doing='cell']").wait_for()
    page.locator("tr[data-worker='2'][data-busy='3']").wait_for()
    page.locator("tr[data-worker='3'] .rb-opener").click()
    shots.take(page, "workers")


def of_resources(shots: Shots) -> None:
    """Workers that compute and send, as charts and as a matrix."""
    notebook = shots.open(4, USE, 2200)
    page = notebook.page
    shots.run(notebook, *USE[:3])
    page.wait_for_timeout(USED)
    shots.run(notebook, USE[3])
    page.wait_for_timeout(USED)
    shots.take(page, "traffic")
    shots.take(page, "resources")


def of_metrics(shots: Shots) -> None:
    """A loss that grows on one rank."""
    notebook = shots.open(4, LOGS, 1400)
    shots.run(notebook, *LOGS)
    notebook.page.locator(".rb-chart .rb-far").first.wait_for()
    notebook.page.wait_for_timeout(1500)
    shots.take(notebook.page, "metrics")


def of_messages(shots: Shots) -> None:
    """What two lines of a program say, between all workers."""
    notebook = shots.open(3, TALK, 1400)
    shots.run(notebook, *TALK)
    page = notebook.page
    page.locator("[data-message]", has_text=re.compile("release ?context", re.IGNORECASE)).first.wait_for()
    page.locator(".rb-messages .rb-body").evaluate("body => { body.scrollTop = 0; }")
    page.locator("[data-message]", has_text="call there_and_on").first.dispatch_event("click")
    page.locator(".rb-chosen").wait_for()
    shots.take(page, "messages")


def of_collectives(shots: Shots) -> None:
    """What workers do together, one of them slow, and one missing at the end; as messages and over time."""
    barrier = "%%remote worker1 worker2 worker4 --async\ndist.barrier()"
    notebook = shots.open(4, [*TOGETHER, barrier], 1800)
    shots.run(notebook, *TOGETHER, barrier)
    page = notebook.page
    page.locator("select[aria-label='Kinds of messages']").select_option("collective")
    only_one = ":has(.rb-missing):not(:has(.rb-missing ~ .rb-missing))"
    page.locator(f"[data-state='open']{only_one}").wait_for()
    page.locator("[data-message]", has_text="all_reduce(SUM) #3").first.dispatch_event("click")
    page.locator(".rb-chosen").wait_for()
    shots.take(page, "collectives", ".rb-messages")
    shots.take(page, "stragglers", "img[alt*='kept the others waiting']")


def of_progress(shots: Shots) -> None:
    """Jobs and cells, of which some run."""
    notebook = shots.open(3, WORK, 1500)
    for source in WORK:
        notebook.run(source[:40])
        notebook.ended(source[:40])
    page = notebook.page
    page.locator(".rb-jobs [data-state='runs']").first.wait_for()
    page.wait_for_timeout(1500)
    shots.take(page, "progress")


def of_shards(shots: Shots) -> None:
    """A sharded model, of which a part is gathered."""
    notebook = shots.open(4, SHARDED, 1500)
    shots.run(notebook, *SHARDED)
    notebook.page.locator(".rb-shards [data-param='1.up.weight'] .rb-now").first.wait_for()
    shots.take(notebook.page, "shards")


def of_compare(shots: Shots) -> None:
    """The report of a comparison, with what it shows of the first difference."""
    notebook = shots.open(4, COMPARED, 1500)
    shots.run(notebook, *COMPARED)
    notebook.page.locator(".rb-compare .rb-heat").first.wait_for()
    shots.take(notebook.page, "compare")


def of_logs(shots: Shots) -> None:
    """What workers write outside cells, with an error that is searched for."""
    notebook = shots.open(2, LOGGED, 1200)
    shots.run(notebook, *LOGGED)
    notebook.page.locator(".rb-logs .rb-line", has_text="ZeroDivisionError").first.wait_for()
    notebook.page.locator(".rb-logs .rb-tools input").fill("loss")
    shots.take(notebook.page, "logs")


def of_plan(shots: Shots) -> None:
    """The layouts of a plan, and the step of the best one."""
    notebook = shots.open(1, [PLANNED], 1500)
    shots.run(notebook, PLANNED)
    notebook.page.locator(".rb-plan .rb-bar").first.wait_for()
    shots.take(notebook.page, "plan")


def of_simulated(shots: Shots) -> None:
    """A simulated step in the pipeline panel."""
    notebook = shots.open(1, [SIMULATED, "%panel pipeline world"], 1500)
    shots.run(notebook, SIMULATED, "%panel pipeline world")
    notebook.page.locator(".rb-pipeline .rb-blocks .rb-op").first.wait_for()
    shots.take(notebook.page, "simulated", ".rb-pipeline")


def of_autograd(shots: Shots) -> None:
    """A backward pass in its middle."""
    notebook = shots.open(3, BACKWARD, 1400)
    page = notebook.page
    shots.run(notebook, "%panel")
    page.locator(".rb-autograd").wait_for()  # operations are known of contexts that begin while a panel is open
    notebook.run("backward(")
    page.wait_for_function(HALFWAY, polling=20)
    shots.take(page, "autograd")
    page.evaluate(GO_ON)
    notebook.ended("backward(")


def of_training(shots: Shots) -> None:
    """The first lesson, once it has trained: the pipeline, and on the dashboard the other panels with it."""
    notebook = shots.lab.open(lesson(), LESSON.name, width=1300, height=2400)
    page = notebook.page
    page.set_default_timeout(240_000)
    page.evaluate(HIDE_LEFT)
    notebook.run_above("%cluster stop")
    notebook.ended("rref.owner_name()")
    page.wait_for_timeout(1500)  # panels draw what they have been sent
    shots.take(page, "pipeline")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.evaluate("jupyterapp.commands.execute('rpcbench:sidebar')")
    page.get_by_role("button", name="Dashboard", exact=True).click()
    page.locator("[data-panel=messages] .rb-panel").wait_for()
    notebook.activate()
    notebook.cell("%cluster stop").scroll_into_view_if_needed()
    page.wait_for_timeout(1500)
    shots.take(page, "dashboard", "#main")


def of_readme(shots: Shots) -> None:
    """The first cells of the README, once they have run."""
    text = README.read_text().partition("## Three cells")[2].partition("\n- ")[0]
    sources = re.findall(r"^```python\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    document = nbformat.v4.new_notebook(cells=cells)
    notebook = shots.lab.open(document, "three.ipynb", width=1200, height=860, scale=7 / 6)
    for command in (HIDE_LEFT, HIDE_STATUS):
        notebook.page.evaluate(command)
    shots.run(notebook, *sources)
    notebook.page.locator(".rb-shards [data-param='0.weight']").first.wait_for()
    notebook.page.screenshot(path=shots.folder / "panels.png")


PANELS = {
    "workers": of_workers,
    "metrics": of_metrics,
    "resources": of_resources,
    "messages": of_messages,
    "collectives": of_collectives,
    "progress": of_progress,
    "shards": of_shards,
    "compare": of_compare,
    "plan": of_plan,
    "logs": of_logs,
    "simulated": of_simulated,
    "autograd": of_autograd,
    "training": of_training,
}
OF = {**PANELS, "readme": of_readme}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the pictures of panels in the documentation.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=OF, default=[*PANELS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, running(Path(home)) as lab:
        for name in options.only:
            OF[name](Shots(lab, options.folder))
            lab.leave()
