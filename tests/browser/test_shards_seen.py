"""A sharded model as a user of JupyterLab sees it: its pieces, what is gathered while a cell runs, and a snapshot."""

from __future__ import annotations

import pytest
from lab import settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

CELLS = [
    "%load_ext rpcbench\n%cluster start 2",
    """%%remote all
import time, warnings
import torch, rpcbench.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters())""",
    "%panel shards model",
    """%%remote all --async
for step in range(5):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
model[2].unshard()
while not hasattr(model, 'enough'):
    time.sleep(0.01)
model[2].reshard()""",
    "for name in cluster.workers: cluster.rpc_sync(name, exec, ('import __main__; __main__.model.enough = True',))",
    "import rpcbench\nrpcbench.shards('model')",
]
BOXES = """root => Object.fromEntries([...root.querySelectorAll('tbody tr')].map(row => [row.dataset.param,
  [...row.querySelectorAll('.rb-piece')].map(one => [one.dataset.worker, one.dataset.now, one.dataset.bytes])]))"""
OPACITY = "all => all.map(one => getComputedStyle(one).opacity)"


def boxes(lit: str) -> dict[str, list[list[str]]]:
    """The cells of all parameters, with those of the second layer lit or not."""
    sizes = {"0.weight": 32768, "0.bias": 512, "2.weight": 32768, "2.bias": 128}
    return {
        name: [[worker, lit if name.startswith("2.") else "false", str(size)] for worker in ("1", "2")]
        for name, size in sizes.items()
    }


@pytest.mark.long
def test_pieces_and_gathered_parameters_are_seen_live(show):
    notebook = show(CELLS, "shards.ipynb")
    notebook.run_to_end("%cluster start", "init_process_group", "%panel")
    live = notebook.output("%panel").locator(".rb-shards")
    settles(notebook.page, lambda: live.evaluate(BOXES), boxes("false"))
    notebook.run_to_end("--async")
    settles(notebook.page, lambda: live.evaluate(BOXES), boxes("true"))  # while the cell runs
    lit = live.locator("[data-param='2.weight'] .rb-lit")
    settles(notebook.page, lambda: lit.evaluate_all(OPACITY), ["1", "1"])
    live.get_by_text("5 optimizer steps").wait_for()
    assert live.locator("figcaption").inner_text() == "DeviceMesh dp=2"
    words = live.locator("[data-param='2.weight'] td").first.get_attribute("title")
    assert words.startswith("worker1: rows 0 to 31 of 64, [32, 256] of [64, 256] float32")
    assert "32.8 kB parameters, 32.8 kB gradients, 65.5 kB optimizer state" in words

    notebook.run_to_end("exec")
    settles(notebook.page, lambda: live.evaluate(BOXES), boxes("false"))
    notebook.run_to_end("rpcbench.shards('model')")
    still = notebook.output("rpcbench.shards('model')").locator("img")
    still.wait_for()
    assert still.evaluate("one => one.decode().then(() => one.naturalWidth)") >= 700
    assert "DeviceMesh dp=2: ranks 0, 1" in still.get_attribute("alt")
    assert notebook.errors() == []
