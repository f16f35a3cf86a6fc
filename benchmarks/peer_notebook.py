"""A notebook with two workers of some library: the cells that a newcomer writes, and the kernel that runs them.

A library is named only in text that a kernel runs; this module imports none but rpcbench.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import psutil

import rpcbench
from benchmarks.kernel_driver import OPENED, Kernel, Message, NotInTime, Ran, kernel
from benchmarks.notebook_waits import MARK, is_marked
from benchmarks.pairs import BenchError

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
    tasks: Mapping[str, str] = MappingProxyType({})  # by a key of `peers.TASKS`: a cell; without one it has no way

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
        return rpcbench.__version__ if self is OURS else importlib.metadata.version(self.packages.split()[0])


OURS = Peer(
    name="rpcbench", module="rpcbench", packages="jupyter-rpcbench",
    start="%load_ext rpcbench\n%cluster start 2",
    workers=("worker1", "worker2"),
    cell="%%remote WORKER\nBODY",
    called=r"\bworker2\b",
    restart="%cluster restart worker2",
    function=False,
    tasks={
        "map": "print(list(cluster.map(lambda n: n * n, range(200))) == SQUARES)",
        "parts": "cluster.scatter('x', PARTS)\ncluster.run('all', 'y = 2 * x')\n"
        "print(torch.equal(cluster.gather('y'), 2 * PARTS))",
        "spmd": "def train():\n    x = torch.ones(1)\n    torch.distributed.all_reduce(x)\n    return x.item()\n"
        "print(cluster.spmd(train) == [2.0, 2.0])",
        "profile": "import rpcbench\nwith rpcbench.profile('worker2') as seen:\n"
        "    cluster.rpc_sync('worker2', torch.mm, (torch.ones(9, 9), torch.ones(9, 9)))\n"
        "print('aten::mm' in str(seen.table()))",
        "stack": "call = cluster.rpc_async('worker2', waits_here)\ntime.sleep(0.5)\n"
        "print('waits_here' in str(cluster.stack('worker2')))\ncall.wait()",
        "saved": "import os, pathlib, rpcbench, tempfile\nos.environ['XDG_CONFIG_HOME'] = place = tempfile.mkdtemp()\n"
        "pathlib.Path(place, 'rpcbench.toml').write_text('[clusters.lab]\\nworkers = 1')\n"
        "with rpcbench.Cluster.saved('lab') as lab:\n    print(lab.workers == ['worker1'])",
    },
)  # fmt: skip

_IPYPARALLEL = Peer(
    name="ipyparallel", module="ipyparallel", packages="ipyparallel",
    start="import ipyparallel\ncluster = ipyparallel.Cluster(n=2)\ncluster.start_and_connect_sync(activate=True)",
    workers=("0", "1"),
    cell="%%px --targets WORKER\nBODY",
    called=r"(?i)\bengines?\W{0,3}1\b|\[1:",
    restart="cluster.restart_engine_sync(1)",
    function=False,
    tasks={
        "map": "client = cluster.connect_client_sync()\n"
        "print(list(client.load_balanced_view().map_sync(lambda n: n * n, range(200))) == SQUARES)",
        "parts": "view = cluster.connect_client_sync()[:]\nview.scatter('x', PARTS, block=True)\n"
        "view.execute('y = 2 * x', block=True)\n"
        "print(torch.equal(torch.cat(view.gather('y', block=True)), 2 * PARTS))",
        "saved": "import os, pathlib\nplace = pathlib.Path(os.environ['IPYTHONDIR'], 'profile_lab')\nplace.mkdir()\n"
        "(place / 'ipcluster_config.py').write_text('c.Cluster.n = 1')\n"
        "lab = ipyparallel.Cluster(profile='lab')\nprint(lab.start_and_connect_sync().ids == [0])\n"
        "lab.stop_cluster_sync()",
    },
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
    tasks={
        "map": "print(client.gather(client.map(lambda n: n * n, range(200))) == SQUARES)",
        "parts": "parts = client.map(lambda x: 2 * x, client.scatter(list(PARTS.chunk(2))))\n"
        "print(torch.equal(torch.cat(client.gather(parts)), 2 * PARTS))",
        "stack": "call = client.submit(waits_here, workers=[1])\ntime.sleep(0.5)\n"
        "print('waits_here' in str(client.call_stack(call)))\ncall.result()",
    },
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
    tasks={
        "map": "from ray.util import ActorPool\npool = ActorPool([worker1, worker2])\n"
        "print(list(pool.map(lambda worker, n: worker.run.remote(lambda: n * n), range(200))) == SQUARES)",
    },
)  # fmt: skip

_MONARCH = Peer(
    name="Monarch", module="monarch", packages="torchmonarch",
    start="from monarch.actor import Actor, endpoint, this_host\n"
    "class Worker(Actor):\n    @endpoint\n    def run(self, deed):\n        return deed()\n"
    "processes = this_host().spawn_procs(per_host={'gpus': 2})\nworkers = processes.spawn('workers', Worker)",
    workers=("0", "1"),
    cell="def deed():\nBODY\nworkers.slice(gpus=WORKER).run.call_one(deed).get()",
    called=r"gpus\W{0,6}1\b",
    tasks={
        "spmd": "from monarch.spmd import setup_torch_elastic_env\nsetup_torch_elastic_env(processes)\n"
        "def train():\n    torch.distributed.init_process_group('gloo')\n    x = torch.ones(1)\n"
        "    torch.distributed.all_reduce(x)\n    torch.distributed.destroy_process_group()\n    return x.item()\n"
        "print(list(workers.run.call(train).get().values()) == [2.0, 2.0])",
    },
)  # fmt: skip

_SPMD_CELL = """import torch
x = torch.ones(1)
torch.distributed.all_reduce(x)
print(x.item() == 2.0)"""
"""The cell of libraries whose workers run all cells together."""

_NBDISTRIBUTED = Peer(
    name="nbdistributed", module="nbdistributed", packages="nbdistributed",
    start="%load_ext nbdistributed\n%dist_init -n 2",
    workers=("0", "1"),
    cell="%%rank [WORKER]\nBODY",
    called=r"(?i)\branks?\W{0,3}1\b",
    function=False,
    tasks={"spmd": f"%%distributed\n{_SPMD_CELL}"},
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
    tasks={"spmd": f"import torch\ntorch.distributed.init_process_group('gloo')\n{_SPMD_CELL}"},
)  # fmt: skip

_ALL = (OURS, _IPYPARALLEL, _DASK, _RAY, _MONARCH, _NBDISTRIBUTED, _JUPYTER_DISTRIBUTED)
PEERS = {peer.name: peer for peer in _ALL}


_BUSY = """import os, pathlib, time
time.sleep(0.5)
new = pathlib.Path({file!r} + '.new')
new.write_text(str(os.getpid()))
new.rename({file!r})
for _ in range({count}):
    time.sleep(0.01)"""
_GLANCE_SECONDS = 0.02


class Plan(NamedTuple):
    """How often, how many, and how many seconds."""

    calls: int = 20
    lines: int = 20
    busy: float = 10.0  # seconds that a call lasts which nobody stops
    patience: float = 20.0
    late: float = 3.0  # how long a printed line may come after its cell
    start: float = 60.0
    losses: int = 3  # so many cells may get lost at the start


QUICK = Plan(calls=3, lines=3)


class Notebook(NamedTuple):
    """A kernel in which two workers wait."""

    peer: Peer
    plan: Plan
    kernel: Kernel
    place: Path
    started: float = 0.0  # seconds until both have made a tensor
    lost: int = 0  # cells that were to make one, and neither did nor failed

    def end(self, cell: str, began: float) -> Ran:
        """NotInTime if the cell goes on."""
        return self.kernel.end(cell, began, self.plan.patience)

    def run(self, code: str) -> Ran:
        began = time.monotonic()
        return self.end(self.kernel.send(code), began)

    def on(self, number: int, body: str) -> Ran:
        """Run this on the first or second worker."""
        return self.run(self.peer.on(self.peer.workers[number - 1], body))

    def busy(self) -> tuple[str, int]:
        """A cell that has the second worker sleep again and again, and the process of that worker."""
        file = self.place / "pid"
        body = _BUSY.format(file=str(file), count=int(self.plan.busy * 100))
        cell = self.kernel.send(self.peer.on(self.peer.workers[1], body))
        deadline = time.monotonic() + self.plan.patience
        while not file.exists():
            if time.monotonic() > deadline:
                raise NotInTime(f"nothing ran on {self.peer.workers[1]} in {self.plan.patience:g} s")
            time.sleep(_GLANCE_SECONDS)  # not all of these libraries show at once what a worker prints
        return cell, int(file.read_text())


@contextmanager
def notebook(peer: Peer, plan: Plan) -> Iterator[Notebook]:
    """No process of it is left afterwards: whatever has our mark in its environment is killed."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True) as place:
        began = time.monotonic()
        with _kernel(peer, Path(place), mark) as made:
            try:
                if peer.extension:
                    made.open(peer.extension.comm)  # its kernel has started the workers by now
                else:
                    made.run("import torch")
                    began = time.monotonic()
                yield _started(Notebook(peer, plan, made, Path(place)), began)
            finally:
                _kill(mark)


def _kernel(peer: Peer, place: Path, mark: str) -> AbstractContextManager[Kernel]:
    homes = dict.fromkeys(("XDG_RUNTIME_DIR", "TMPDIR", "RAY_TMPDIR", "IPYTHONDIR"), str(place))
    # As in an activated environment: some start their workers by the name `python`.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environ = {**homes, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0", MARK: mark}
    if not peer.extension:
        return kernel(environ)
    return kernel({**environ, **peer.extension.environ}, peer.extension.module)


def _started(user: Notebook, began: float) -> Notebook:
    """Both workers have made a tensor. BenchError where one cannot."""
    peer, lost = user.peer, 0
    if peer.start:
        user.kernel.run(peer.start, patience=user.plan.start)
    for worker in peer.workers:
        while not _shows_tensor(user.kernel.run(peer.on(worker, peer.first), patience=user.plan.start)):
            lost += 1
            if lost > user.plan.losses:
                raise BenchError(f"no tensor was made on {worker}, and no error told why; such cells: {lost}")
    return user._replace(started=time.monotonic() - began, lost=lost)


def _shows_tensor(ran: Ran) -> bool:
    return any("tensor(" in said(message) for message in ran.messages)


def _kill(mark: str) -> None:
    """All but the trackers of multiprocessing: they end after the others and remove what those have left."""
    while left := [process for process in psutil.process_iter() if is_marked(process, mark)]:
        for process in left:
            with contextlib.suppress(psutil.Error):  # it has gone by itself
                if not any("resource_tracker" in word for word in process.cmdline()):
                    process.kill()
        psutil.wait_procs(left, timeout=_GLANCE_SECONDS)


def said(message: Message) -> str:
    """What a message shows, without the lines of the user's own code that a traceback repeats."""
    match message.kind:
        case "stream":
            return message.text
        case "error":
            return f"{message.content['ename']}: {message.content['evalue']}"
        case "display_data" | "update_display_data" | "execute_result":
            return str(message.content["data"].get("text/plain", ""))
        case "comm_msg" if message.content["comm_id"] == OPENED:
            return json.dumps(message.content["data"], ensure_ascii=False)
    return ""
