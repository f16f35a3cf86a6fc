"""Jobs on four workers that take longer than they should, for lesson 32. Find out why before you read on here.

The stages of the pipelines sleep where real ones would compute, so that four workers need no four cores. The others
compute. The first three jobs run for some steps. A mystery runs in the background, until it is stopped.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import random
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import rpcbench.rpc as rpc
from rpcbench import Cluster
from rpcbench.launch.base_cluster import running_clusters
from rpcbench.pipeline import Pipeline, StepResult, split
from rpcbench.testing import Faults, install

T = TypeVar("T")
STAGE = 0.005  # seconds that a stage needs for the forward of a micro-batch; its backward needs twice that
SAMPLES, INPUTS, CLASSES = 9000, 16, 10  # of the second job; counting so many takes longer than a turn of a core
PARAMETERS = 64 * (INPUTS + 1) + CLASSES * (64 + 1)  # of the second job's network


class Sleeps(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x * self.weight, self.seconds)


def pipeline(cluster: Cluster, microbatches: int, seconds: Sequence[float] = (STAGE,) * 4) -> StepResult:
    """Run steps of a pipeline whose stages need so long. Return the quickest, as the machine held up the others."""
    pipe, ones = make_pipeline(cluster, microbatches, seconds), torch.ones(microbatches, 1)
    results = [pipe.step(ones, ones) for _ in range(6)][2:]  # the first ones open the ways between the workers
    return min(results, key=seconds_of)


def make_pipeline(cluster: Cluster, microbatches: int, seconds: Sequence[float]) -> Pipeline:
    stages = split(nn.Sequential(*map(Stage, seconds)), cluster.workers, balance=[1] * len(seconds))
    return Pipeline(stages, "1f1b", microbatches, loss_fn=F.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.0}))


def seconds_of(result: StepResult) -> float:
    return result.timeline.seconds


# -- the jobs
def first_job(cluster: Cluster, microbatches: int = 3) -> StepResult:
    """A pipeline of four equal stages."""
    return pipeline(cluster, microbatches)


def second_job(cluster: Cluster, steps: int = 12, mended: bool = False) -> list[list[float]]:
    """Data parallel training. Returns, for each rank, when it came to the all-reduce of each step, in seconds."""
    return cluster.spmd(train, steps, mended)


def third_job(cluster: Cluster, mended: bool = False) -> StepResult:
    """The first job with more micro-batches."""
    cluster.rpc_sync("worker2", set_link, ("Parcel", 3, 0.0 if mended else 0.020))
    try:
        return pipeline(cluster, 8)
    finally:
        cluster.rpc_sync("worker2", set_link)


# -- their parts
def train(steps: int, mended: bool) -> list[float]:
    """Train a network of two layers on this rank's samples."""
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(SAMPLES, INPUTS), torch.randint(CLASSES, (SAMPLES,))
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    came = []
    dist.barrier()  # all begin together
    for _ in range(steps):
        scores = model(x)
        F.cross_entropy(scores, y).backward()
        if dist.get_rank() == 2 and not mended:
            count_right(scores, y)
        came.append(time.monotonic())
        dist.all_reduce(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        model.zero_grad()
    return came


def count_right(scores: Tensor, y: Tensor) -> int:
    """How many answers are right. One by one; `(scores.argmax(1) == y).sum()` would do."""
    right = 0
    for guess, label in zip(scores.argmax(1), y, strict=True):
        right += (guess == label).item()
    return right


def measure_products(width: int = 512, times: int = 30) -> float:
    """Operations per second that this rank does in products of matrices, while the others do the same."""
    one, other = torch.randn(width, width), torch.randn(width, width)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        torch.mm(one, other)
    dist.barrier()
    return 2 * width**3 * times / (time.perf_counter() - began)


def set_link(kind: str = "", to: int = 0, seconds: float = 0.0) -> None:
    """Hold back all messages of this worker to worker number `to`, by so many seconds; by default nothing."""
    faults = install(Faults())  # in place of earlier ones
    if seconds:
        faults.delay(kind, seconds, to=to)


# -- mysteries: what may be wrong
WORKERS = ("worker1", "worker2", "worker3", "worker4")
SLOW = 0.030  # seconds of a message on a slow link
ROWS, LAYERS = 3000, 8  # of a network that trains for ever; a layer has INPUTS inputs and as many outputs
TABLE = torch.arange(8000.0).reshape(1000, 8)
EVERY = "all"  # in place of a worker, where no worker is to blame
JOBS = {
    "training": ("straggler", "uneven data", "slow loader", "small messages", "hang"),
    "pipeline": ("bubble", "imbalance", "slow link"),
    "lookup": ("straggler", "slow link", "serial calls"),
}
OF_EVERY = ("bubble", "small messages")  # faults of a program as a whole


class Fault(NamedTuple):
    """What is wrong with a mystery. `asks`: the worker that asks the others, in a lookup."""

    job: str
    kind: str
    worker: str
    asks: str = ""


def choose_fault(seed: int) -> Fault:
    """The fault of this mystery."""
    chance = random.Random(f"mystery {seed}")
    job, kind = chance.choice([(job, kind) for job, kinds in JOBS.items() for kind in kinds])
    return place_fault(job, kind, chance)


def place_fault(job: str, kind: str, chance: random.Random) -> Fault:
    """Choose a worker for a fault."""
    if kind in OF_EVERY:
        return Fault(job, kind, EVERY)
    if job != "lookup":
        there = WORKERS[:-1] if kind == "slow link" else WORKERS  # the last stage sends forward to none
        return Fault(job, kind, chance.choice(there))
    asks, answers = chance.sample(WORKERS, 2)
    return Fault(job, kind, asks if kind == "serial calls" else answers, asks)


# -- mysteries: in the notebook
class Mystery:
    """A job that runs in the background until `stop`. `result`, of a pipeline: the quickest of its latest steps."""

    # The job of a rank, of a pipeline's driver, or of the worker that asks, ends by itself after a step, once `end_job`
    # has told the places where its loop runs; so no collective is cut off, and the workers are in no error.

    def __init__(self, cluster: Cluster, fault: Fault) -> None:
        if tuple(cluster.workers) != WORKERS:
            raise ValueError(f"a mystery runs on {', '.join(WORKERS)}, and there are others: %cluster start 4")
        self._cluster, self._fault, self._key = cluster, fault, uuid.uuid4().hex
        self._steps: deque[StepResult] = deque(maxlen=6)
        self._error: Exception | None = None
        # where its loop runs; a pipeline is driven from here
        self._places = {"training": WORKERS, "pipeline": (), "lookup": (fault.asks,)}[fault.job]
        here = contextvars.copy_context()  # the current cluster is that of this thread
        self._thread = threading.Thread(target=here.run, args=(self._run,), daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not all(self._call(has_started)):
            self._thread.join(0.02)
        self._raise_error()

    def __repr__(self) -> str:
        return f"a {self._fault.job} job on {len(WORKERS)} workers, until `stop()`"

    @property
    def result(self) -> StepResult:
        if not self._steps:
            raise AttributeError("this job is no pipeline, so it has no `result`")
        return min(self._steps, key=seconds_of)

    def stop(self) -> None:
        """End the job. The workers are free afterwards. Raises the error of a job that has failed."""
        if self._cluster not in running_clusters().values():
            return  # it was stopped, and the job with it
        if self._thread.is_alive():
            self._call(end_job)
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _call(self, function: Callable[[str], T]) -> list[T]:
        """Call a function where the loop runs."""
        if not self._places:
            return [function(self._key)]
        there = [name for name in self._places if name in self._cluster.workers]
        return [call.wait() for call in [self._cluster.rpc_async(name, function, (self._key,)) for name in there]]

    def _run(self) -> None:
        try:
            {"training": self._train, "pipeline": self._drive, "lookup": self._look_up}[self._fault.job]()
        except Exception as error:  # noqa: BLE001  (the constructor or `stop` raises it)
            self._error = error

    def _train(self) -> None:
        faulty = [self._fault.kind if self._fault.worker in (name, EVERY) else "" for name in WORKERS]
        self._cluster.spmd(train_for_ever, self._key, faulty)

    def _drive(self) -> None:
        place, kind = WORKERS.index(self._fault.worker) if self._fault.worker != EVERY else 0, self._fault.kind
        seconds = [3 * STAGE if kind == "imbalance" and stage == place else STAGE for stage in range(4)]
        microbatches = 3 if kind == "bubble" else 8
        pipe, ones = make_pipeline(self._cluster, microbatches, seconds), torch.ones(microbatches, 1)
        with self._link(kind, "Parcel", place + 2):
            for _ in range(2):  # the first ones open the ways between the workers
                pipe.step(ones, ones)
            while not self._steps or not is_over(self._key):
                self._steps.append(pipe.step(ones, ones))

    def _look_up(self) -> None:
        others = [name for name in WORKERS if name != self._fault.asks]
        kinds = [self._fault.kind if name == self._fault.worker else "" for name in others]
        in_turn = self._fault.kind == "serial calls"
        with self._link(self._fault.kind, "Result", 1 + WORKERS.index(self._fault.asks)):
            self._cluster.spmd(ask_for_ever, self._key, others, kinds, in_turn, workers=[self._fault.asks])

    @contextlib.contextmanager
    def _link(self, kind: str, message: str, to: int) -> Iterator[None]:
        """A slow link meanwhile, if that is the fault."""
        if kind != "slow link":
            yield
            return
        self._cluster.rpc_sync(self._fault.worker, set_link, (message, to, SLOW))
        try:
            yield
        finally:
            self._cluster.rpc_sync(self._fault.worker, set_link)


_latest: list[Mystery] = []  # the one that was started last


def mystery(cluster: Cluster, seed: int) -> Mystery:
    """Start the job with the fault of this number, in place of the one before. It runs when this returns."""
    return start(cluster, choose_fault(seed))


def fault_of_latest() -> Fault | None:
    """What is wrong with the mystery that was started last."""
    return _latest[0]._fault if _latest else None


def start(cluster: Cluster, fault: Fault) -> Mystery:
    """Start a job with this fault, in place of the one before."""
    while _latest:
        _latest.pop().stop()
    _latest.append(job := Mystery(cluster, fault))
    return job


# -- mysteries: on workers
class Progress(NamedTuple):
    """Of a job here: whether it has begun, and whether it is to end."""

    started: threading.Event
    ended: threading.Event


_jobs: defaultdict[str, Progress] = defaultdict(lambda: Progress(threading.Event(), threading.Event()))


def has_started(key: str) -> bool:
    return _jobs[key].started.is_set()


def end_job(key: str) -> None:
    _jobs[key].ended.set()


def is_over(key: str) -> bool:
    """Whether the job is to end; asked after a step."""
    _jobs[key].started.set()
    return _jobs[key].ended.is_set()


def train_for_ever(key: str, faults: Sequence[str]) -> None:
    """Data parallel training. `faults`: of each rank."""
    fault = faults[dist.get_rank()]
    batches, seconds = 6 if fault == "uneven data" else 1, 0.060 if fault == "slow loader" else 0.0
    together = fault != "small messages"
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.Linear(INPUTS, INPUTS) for _ in range(LAYERS)))
    for step in itertools.count():
        for _ in range(batches):
            x, y = load_batch(seconds)
            scores = model(x)
            F.cross_entropy(scores, y).backward()
        if fault == "straggler":
            count_right(scores, y)
        if fault == "hang" and step == 3:
            report_loss(key)
        if add_gradients(model, together, step > 2 and is_over(key)):
            return
        model.zero_grad()


def load_batch(seconds: float) -> tuple[Tensor, Tensor]:
    """Read the next batch; a disk may need so long."""
    if seconds:
        time.sleep(seconds)
    return torch.randn(ROWS, INPUTS), torch.randint(INPUTS, (ROWS,))


def add_gradients(model: nn.Module, together: bool, over: bool) -> bool:
    """Add up the gradients of all ranks. Returns whether a rank has said that the job is over."""
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    gradients[-1] = torch.cat([gradients[-1], torch.tensor([float(over)])])  # all are to end after the same step
    tensors = [torch.cat(gradients)] if together else gradients
    for tensor in tensors:
        dist.all_reduce(tensor)
    return tensors[-1][-1].item() > 0


def report_loss(key: str) -> None:
    """Tell of the loss, and wait until somebody has read it."""
    _jobs[key].started.set()
    _jobs[key].ended.wait()


def ask_for_ever(key: str, others: Sequence[str], faults: Sequence[str], in_turn: bool) -> None:
    """Ask each of the others for rows of its table, again and again. `faults`: of each of them."""
    rows = torch.arange(len(TABLE))
    while not is_over(key):
        calls = []
        for name, fault in zip(others, faults, strict=True):
            calls.append(rpc.rpc_async(name, look_up, (rows, fault == "straggler")))
            if in_turn:
                calls[-1].wait()
        for call in calls:
            call.wait()


def look_up(rows: Tensor, one_by_one: bool) -> Tensor:
    """These rows of this worker's table."""
    time.sleep(STAGE)
    return torch.stack([TABLE[row] for row in rows]) if one_by_one else TABLE[rows]
