"""The cells that a newcomer to each library writes for the same deeds on two workers; rpcbench is one of them.

A library is only named in text that a kernel runs: nothing of it is imported here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

BY_ITSELF = "# it does so by itself"
"""The restart of a library that needs no asking: when it began is not seen."""


class Extension(NamedTuple):
    """What a library's extension of JupyterLab does before the first cell, where no cell can do it."""

    module: str  # the kernel that it launches, which starts two workers
    environ: Mapping[str, str]
    comm: str  # what it opens to hear of output while a cell runs


class Peer(NamedTuple):
    """How one library starts two workers, runs code on one of them, names the second one and starts that again."""

    name: str
    module: str
    packages: str  # what pip installs; its version is that of the first
    start: str
    workers: tuple[str, str]
    cell: str  # WORKER and BODY stand for a worker and what runs there
    called: str  # the second worker, as text by which a user knows it: a regular expression
    restart: str = ""  # empty: it has no way to start one worker again
    function: bool = True  # whether BODY is that of a function
    extension: Extension | None = None
    fenced: bool = False  # whether it is a danger to other processes, or lets other hosts in

    def on(self, worker: str, body: str) -> str:
        """A cell that runs this on a worker."""
        code = textwrap.indent(body, "    ") if self.function else body
        return self.cell.replace("WORKER", worker).replace("BODY", code)

    @property
    def first(self) -> str:
        """The first thing a worker does, which shows a tensor; a function takes the torch of the notebook along."""
        return "return torch.ones(1)" if self.function else "import torch\ntorch.ones(1)"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.packages.split()[0])


OURS = Peer(
    name="rpcbench", module="rpcbench", packages="rpcbench",
    start="%load_ext rpcbench\n%cluster start 2",
    workers=("worker1", "worker2"),
    cell="%%remote WORKER\nBODY",
    called=r"\bworker2\b",
    restart="%cluster restart worker2",
    function=False,
)  # fmt: skip

_IPYPARALLEL = Peer(
    name="ipyparallel", module="ipyparallel", packages="ipyparallel",
    start="import ipyparallel\ncluster = ipyparallel.Cluster(n=2)\ncluster.start_and_connect_sync(activate=True)",
    workers=("0", "1"),
    cell="%%px --targets WORKER\nBODY",
    called=r"(?i)\bengines?\W{0,3}1\b|\[1:",
    restart="cluster.restart_engine_sync(1)",
    function=False,
)  # fmt: skip

_DASK = Peer(
    name="Dask", module="distributed", packages="distributed",
    # The dashboard would listen beyond loopback.
    start="from distributed import Client, LocalCluster\n"
    "cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)\n"
    "client = Client(cluster)",
    workers=("0", "1"),
    cell="def deed():\nBODY\nclient.submit(deed, workers=[WORKER], pure=False).result()",
    called=r"(?i)\b(worker|name)\W{0,3}1\b",
    restart="client.restart_workers([1])",
)  # fmt: skip

_RAY = Peer(
    name="Ray", module="ray", packages="ray",
    start="import ray\nray.init(num_cpus=2, include_dashboard=False)\n"
    "@ray.remote\nclass Worker:\n    def run(self, deed):\n        return deed()\n"
    "worker1 = Worker.options(name='worker1', max_restarts=-1).remote()\n"
    "worker2 = Worker.options(name='worker2', max_restarts=-1).remote()",
    workers=("worker1", "worker2"),
    cell="def deed():\nBODY\nray.get(WORKER.run.remote(deed))",
    called=r"\bworker2\b",
    restart=BY_ITSELF,
)  # fmt: skip

_MONARCH = Peer(
    name="Monarch", module="monarch", packages="torchmonarch",
    start="from monarch.actor import Actor, endpoint, this_host\n"
    "class Worker(Actor):\n    @endpoint\n    def run(self, deed):\n        return deed()\n"
    "workers = this_host().spawn_procs(per_host={'gpus': 2}).spawn('workers', Worker)",
    workers=("0", "1"),
    cell="def deed():\nBODY\nworkers.slice(gpus=WORKER).run.call_one(deed).get()",
    called=r"gpus\W{0,6}1\b",
)  # fmt: skip

_NBDISTRIBUTED = Peer(
    name="nbdistributed", module="nbdistributed", packages="nbdistributed",
    start="%load_ext nbdistributed\n%dist_init -n 2",
    workers=("0", "1"),
    cell="%%rank [WORKER]\nBODY",
    called=r"(?i)\branks?\W{0,3}1\b",
    function=False,
    fenced=True,  # it takes pickles from whoever reaches its port, and ends processes that are not its own
)  # fmt: skip

_JUPYTER_DISTRIBUTED = Peer(
    name="jupyter-distributed", module="jupyter_distributed", packages="jupyter-distributed",
    start="",
    workers=("0", "1"),
    cell="%%rank WORKER\nBODY",
    called=r"\brank 1 (failed|process)\b",  # every output begins with the name of its rank
    function=False,
    extension=Extension(
        module="jupyter_distributed.kernel",
        environ={"JUPYTER_DISTRIBUTED_WORLD_SIZE": "2", "JUPYTER_DISTRIBUTED_BASE_KERNEL": "python3"},
        comm="jupyter.distributed.rank_updates",
    ),
)  # fmt: skip

_ALL = (OURS, _IPYPARALLEL, _DASK, _RAY, _MONARCH, _NBDISTRIBUTED, _JUPYTER_DISTRIBUTED)
PEERS = {peer.name: peer for peer in _ALL}
