"""rpcbench: a Jupyter workbench for distributed PyTorch.

Public names are resolved on first use, so `import rpcbench` loads neither torch nor IPython and starts no thread. It
fails where rpcbench cannot work (`base.requirements`).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from rpcbench.base.requirements import check_requirements

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

check_requirements()

__version__ = "0.1.0"

_HOMES = {  # module of each public name
    "Cluster": "rpcbench.launch.cluster",
    "cluster": "rpcbench.launch.cluster",
    "Future": "rpcbench.base.futures",
    "collect_all": "rpcbench.base.futures",
    "wait_all": "rpcbench.base.futures",
    "capture": "rpcbench.compare.capture",
    "CompareReport": "rpcbench.compare.report",
    "Difference": "rpcbench.compare.report",
    "CollectiveError": "rpcbench.base.errors",
    "CompareError": "rpcbench.base.errors",
    "ConnectionLostError": "rpcbench.base.errors",
    "explain": "rpcbench.runtime.deadlocks",
    "RpcError": "rpcbench.base.errors",
    "RpcTimeoutError": "rpcbench.base.errors",
    "RemoteError": "rpcbench.base.errors",
    "DeadlockError": "rpcbench.base.errors",
    "SerializationError": "rpcbench.base.errors",
    "RankFailedError": "rpcbench.base.errors",
    "UnknownVariableError": "rpcbench.base.errors",
    "UnknownWorkerError": "rpcbench.base.errors",
    "WorkerLostError": "rpcbench.base.errors",
    "RRef": "rpcbench.rpc",
    "register_reducer": "rpcbench.serialization.pickler",
    "panel": "rpcbench.panels",
    "log": "rpcbench.runtime.metrics",
    "log_to": "rpcbench.runtime.metrics",
    "save_metrics": "rpcbench.telemetry.metric_views",
    "trace": "rpcbench.telemetry.trace",
    "profile": "rpcbench.telemetry.profile_files",
    "attach": "rpcbench.telemetry.attached_job",
    "collectives": "rpcbench.telemetry.trace",
    "shards": "rpcbench.telemetry.shard_watch",
    "watch_model": "rpcbench.distributed.shard_events",
    "simulate": "rpcbench.launch.simulate_programs",
    "simulated_value": "rpcbench.simulation.fake_world",
    "SimulatedWorld": "rpcbench.simulation.simulated_world",
    "SimulationError": "rpcbench.base.errors",
    "Hardware": "rpcbench.simulation.hardware",
    "hardware": "rpcbench.simulation.hardware",
    "notebook_launcher": "rpcbench.launch.notebook_launch",
    "measure_hardware": "rpcbench.launch.simulate_programs",
    "plan": "rpcbench.launch.plan_layouts",
    "record": "rpcbench.telemetry.recording",
    "replay": "rpcbench.panels.replay",
}

__all__ = [*_HOMES, "load_ipython_extension", "unload_ipython_extension"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rpcbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, and bind `rpcbench` unless that name is taken. Called by `%load_ext rpcbench`."""
    from rpcbench.cli import find_conflict
    from rpcbench.notebook import magics, warn_on_stderr

    if warning := find_conflict():
        warn_on_stderr(warning)
    magics.register(shell)
    shell.user_ns.setdefault(__name__, sys.modules[__name__])


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics and stop the clusters that they started. Called by `%unload_ext rpcbench`."""
    from rpcbench.notebook import magics

    magics.unregister(shell)
