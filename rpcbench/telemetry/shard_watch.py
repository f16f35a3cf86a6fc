"""`rpcbench.shards()`: a still picture of the models that workers watch, and the watch of a variable of their cells.

A variable is looked up, and its model watched, by a cell on each worker: there no other code of the program runs, so
gradients may be read. So it waits for cells that run, and Ctrl-C ends the wait.
"""

from __future__ import annotations

import keyword

from rpcbench.cells.client import run_script_cell
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.cluster import cluster
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.shard_views import shards_view
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.views import View

_MODULE = "rpcbench.distributed.shard_events"  # loaded on the workers that are asked to watch, and only there


def shards(name: str = "") -> Snapshot:
    """Return a picture of the models that the workers watch: the pieces, bytes and mesh of each.

    Args:
        name: A variable of the workers' cells that holds a model: it is watched from now on, and shown alone. Without
            a name, all watched models are shown: those that `rpcbench.watch_model` or `%panel shards` was given.

    Returns:
        A picture to display; `print` shows it as text, `save` writes it as SVG or HTML.

    Raises:
        ValueError: No worker has a model of that name, or no model is watched.
        RuntimeError: RPC is not initialized; or there is no cluster, and a name is given.
    """
    if name:
        watch_on_workers(name)
    view = current_view(collect.current_collector())
    if name:
        view = view_of_model(view, name)
    if not view["models"]:
        raise ValueError("no model is watched: name a variable of the workers' cells, as rpcbench.shards('model')")
    return Snapshot(view)


def current_view(collector: Collector) -> View:
    """Return the view of what all members have now."""
    stop = collector.subscribe(lambda: None)
    try:
        collector.settle()
        return shards_view(collector.world())
    finally:
        stop()


def view_of_model(view: View, model: str) -> View:
    rows = {
        section: {key: row for key, row in part.items() if row.get("model") == model}
        for section, part in view.items()
        if section != "workers"
    }
    return {"workers": view["workers"], **rows}


def watch_on_workers(name: str, world: BaseCluster | None = None) -> None:
    """Watch the model that the variable `name` of the cells holds, on all workers of the current cluster that have it.

    Raises ValueError if none has it, RuntimeError without a cluster.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"a variable of the workers' cells is shown, and {name!r} is not the name of one")
    world = world or cluster()
    # An expression that is None where all is well, so that `_` on the workers stays.
    code = f"__import__({_MODULE!r}, fromlist=['']).watch_variable({name!r}) or None"
    said = run_script_cell(world.agent, world.workers, world.workers, code, None, (), None, listed="")
    replies = said if isinstance(said, dict) else {world.workers[0]: said}
    if all(replies.values()):
        worker, why = next(iter(replies.items()))
        raise ValueError(f"no worker has a model {name}: on {worker} {why}")
