"""A profile of one process: torch's operators on all its threads, and its memory.

Another member begins and ends it by calls, which pool threads run, so it works while a cell runs here. Guarantees
- It has the operators of every thread, whenever that thread began: cells, calls, backward passes, pipelines.
- Times are seconds of this process's `time.monotonic`, which telemetry puts on one clock.
- Of more than `KEPT` operators the longest are kept, and the others counted; the sums have all of them.
- A process has one profile at a time. It ends without a result when the member that began it leaves.
"""
# torch reports allocations only to the thread that started a profiler, and only without `profile_all_threads`. So the
# memory is that of the process, which a thread samples, and of torch on its GPUs; bytes by operator, on request, come
# from a second profiler in each thread (`runtime/operator_memory.py`).

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as torch_profiler

from rpcbench.base.conditions import Event
from rpcbench.base.errors import RpcError
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.runtime.operator_columns import CPU, Identity, Operator, OperatorColumns, OperatorSum
from rpcbench.runtime.operator_kinds import COMMUNICATION, OTHER, KindSeconds, Spans, classify_operator
from rpcbench.runtime.operator_memory import UNKNOWN_BLOCK, AllocationMeter, leave_block
from rpcbench.runtime.operator_parts import PartColumns, PartSum

KEPT = 100_000  # operators of a member
SAMPLE_SECONDS = 0.01  # between two samples of memory, at first
SAMPLES = 4096
"""Samples at most: then every other one is dropped, and the time between two doubles."""
_profile: Any = torch_profiler.profile  # as the next, without annotations
_cuda: Any = torch.cuda
_NUMBER_BITS = 44  # of autograd's numbers of operators, each of which counts on one thread
_TORCH_INNER = "profiler::_record_function_"
"""The operators by which torch begins and ends a `record_function`."""


class MemberProfile(NamedTuple):
    """The profile of one member."""

    operators: list[Operator]
    sums: list[OperatorSum]
    memory: list[tuple[float, dict[str, int]]]  # time; bytes of the process, and of torch on each GPU
    left_out: int = 0  # operators, the shortest ones
    allocated: dict[str, int] | None = None  # bytes by operator; None if nobody asked for them
    kinds: KindSeconds | None = None
    computed: Spans | None = None  # when it computed, as `kinds` counts it, on the clock of its operators
    parts: Sequence[PartSum] = ()  # of the model, and that of operators without one
    flops: float | None = None  # of its matrix products, convolutions and attention; None where shapes are unknown


def begin_profile(owner: int, number: int, allocations: bool = False) -> None:
    """Begin the profile `number` of the member `owner` in this process. RpcError if another one runs here."""
    current.current_agent().part(OperatorProfiler).begin_profile(owner, number, allocations)


def end_profile(owner: int, number: int) -> MemberProfile:
    """End the profile `number` of the member `owner`, and return it. RpcError if it does not run here."""
    return current.current_agent().part(OperatorProfiler).end_profile(owner, number)


def is_profiled(agent: Agent | None) -> bool:
    """Return whether the profile of a member of ours runs in the process of this agent."""
    return agent is not None and agent.part(OperatorProfiler).is_running


def measured_allocations(agent: Agent) -> contextlib.AbstractContextManager[None]:
    """Count what operators of this thread allocate meanwhile, if a profile of this process asks for that."""
    profiler = agent.part(OperatorProfiler) if agent.has(OperatorProfiler) else None
    return contextlib.nullcontext() if profiler is None else profiler.measured_block()


class OperatorProfiler:
    """The profile that runs in this process, if any. One for each agent: `agent.part(OperatorProfiler)`."""

    def __init__(self, agent: Agent) -> None:
        self._name = agent.name
        self._lock = threading.Lock()  # guards `_running`; held while torch's profiler starts and stops
        self._running: tuple[int, int, _Session] | None = None  # owner, number
        self._ended: dict[int, int] = {}  # by owner: the last number that it has ended
        self._meter: AllocationMeter | None = None  # of the profile that runs, if it asks for allocations
        self._around = agent.hooks.around
        agent.on_member(self._member_changed)
        agent.hooks.on_end.append(self._agent_stopped)

    @property
    def is_running(self) -> bool:
        """Whether a profile runs."""
        return self._running is not None

    def measured_block(self) -> contextlib.AbstractContextManager[None]:
        """Count what operators of this thread allocate meanwhile, if the profile that runs asks for that."""
        meter = self._meter
        return contextlib.nullcontext() if meter is None else meter.measured_block()

    def begin_profile(self, owner: int, number: int, allocations: bool) -> None:
        """Begin a profile, in place of an earlier one of the same owner, whose end was interrupted."""
        leave_block()  # the call that runs this may be in one of that earlier profile
        with self._lock:
            if number == self._ended.get(owner):  # after Ctrl-C there the end can come first
                raise RpcError(f"the profile of {self._name} has ended before it began")
            if self._running is not None and self._running[0] == owner:
                self._discard_profile()
            if self._running is not None:
                raise RpcError(f"{self._name} is being profiled by another member: wait until that has ended")
            if torch_profiler._is_profiler_enabled or _profiler_enabled():
                raise RpcError(f"a profiler of torch runs on {self._name} already: end it first")
            meter = None
            if allocations:
                with _without_notices():
                    meter = AllocationMeter()
            self._running = owner, number, _Session()
            self._meter = meter
            if allocations and self.measured_block not in self._around:
                self._around.append(self.measured_block)  # for good: a call may be about to enter it

    def end_profile(self, owner: int, number: int) -> MemberProfile:
        """End a profile and return it."""
        leave_block()
        with self._lock:
            self._ended[owner] = number
            if self._running is None or self._running[:2] != (owner, number):
                raise RpcError(f"the profile of {self._name} was ended before its time")
            session, self._running = self._running[2], None
            meter, self._meter = self._meter, None
            made = session.collect_profile()
            return made if meter is None else made._replace(allocated=meter.collect_sums())

    def _member_changed(self, kind: str, who: WorkerInfo, _reason: str) -> None:
        with self._lock:
            if kind not in GONE:
                return
            self._ended.pop(who.id, None)
            if self._running is not None and self._running[0] == who.id:
                self._discard_profile()

    def _agent_stopped(self) -> None:
        with self._lock:
            self._discard_profile()

    def _discard_profile(self) -> None:
        if self._running is not None:
            session, self._running, self._meter = self._running[2], None, None
            session.stop_profiling()


class _Session:
    """Torch's profiler and the sampler of memory, from construction to `end_profile` or `stop_profiling`."""

    def __init__(self) -> None:
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        device = "cuda" if torch.cuda.is_available() else None
        self._profiler = _profile(use_kineto=True, use_device=device, experimental_config=everywhere)
        self._ahead = _clock_offset()
        with _without_notices():
            self._profiler.__enter__()
        self._began = self._ended = time.monotonic()
        self._memory = _MemorySampler()

    def stop_profiling(self) -> None:
        """End it without a result."""
        self._ended = time.monotonic()
        self._memory.stop_sampling()
        self._profiler.__exit__(None, None, None)

    def collect_profile(self) -> MemberProfile:
        self.stop_profiling()
        threads = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
        threads[os.getpid()] = threading.main_thread().name  # after a fork Python still has the id in the parent
        found, parts = collect_operators(self._profiler.kineto_results.events(), self._ahead, threads)
        made = bounded_profile(found, self._memory.samples, self._ended - self._began)
        return made._replace(parts=parts.sum_parts(found))


def _clock_offset() -> int:
    """Return the nanoseconds by which torch's stamps, of the time since 1970, are ahead of `time.monotonic`."""
    # Of several readings the quickest: the thread may have lost the processor within the others.
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(8)]
    before, stamp, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return stamp - (before + after) // 2


def bounded_profile(
    found: OperatorColumns, memory: list[tuple[float, dict[str, int]]], span: float | None = None
) -> MemberProfile:
    """Return the profile of these operators, with the longest `KEPT` of them. `span`: the seconds of the profile."""
    kept = found.find_longest(KEPT)
    sums = found.sum_operators()
    kinds, computed = found.measure_kinds(span)
    return MemberProfile(kept, sums, memory, len(found) - len(kept), kinds=kinds, computed=computed)


def collect_operators(
    events: Iterable[Any], ahead: int, threads: Mapping[int, str]
) -> tuple[OperatorColumns, PartColumns]:
    """Return the operators among torch's events, whose stamps are `ahead` nanoseconds before our clock, and parts."""
    found, parts = OperatorColumns(), PartColumns()
    for event in events:
        name: str = event.name()
        if event.is_hidden_event() or name.startswith(_TORCH_INNER):
            continue
        device, place = event.device_type().name, event.device_resource_id()
        track = threads.get(place, f"thread {place}")
        if device != CPU:
            track = f"{device} {event.device_index()}, stream {place}"
        alone = not event.is_async() and event.start_thread_id() == event.end_thread_id()
        kind = classify_operator(name, event.activity_type(), device != CPU)
        identity = name, track, device, alone or device != CPU, kind
        begin, seconds = (event.start_ns() - ahead) * 1e-9, event.duration_ns() * 1e-9
        found.add_operator(identity, begin, seconds)
        _collect_part(parts, event, identity, begin, seconds)
    return found, parts


def _collect_part(parts: PartColumns, event: Any, identity: Identity, begin: float, seconds: float) -> None:
    """Take the events that assign operators to parts of the model: annotations, autograd's numbers, launches."""
    name, track, device, alone, kind = identity
    if device != CPU:
        parts.add_kernel(event.correlation_id(), seconds, kind)
    elif event.is_user_annotation():
        if alone and kind != COMMUNICATION:
            parts.add_range(name, track, begin, seconds)
    elif kind == OTHER:  # a call of the driver
        parts.launches.add_point(event.correlation_id(), parts.number_thread(track), begin)
    elif (number := event.sequence_nr()) >= 0:
        of_backward = event.fwd_thread_id()  # 0 for a forward operator
        points = parts.backward if of_backward else parts.forward
        link = (of_backward or event.start_thread_id()) << _NUMBER_BITS | number
        points.add_point(link, parts.number_thread(track), begin)


class _MemorySampler:
    """A thread that samples the memory of this process until `stop_sampling`."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._process = psutil.Process()
        self._stop_event = Event()
        self._thread = threading.Thread(target=self._sample_loop, name="rpcbench-memory", daemon=True)
        self._thread.start()

    def stop_sampling(self) -> None:
        self._stop_event.set()
        self._thread.join()

    def _sample_loop(self) -> None:
        every = SAMPLE_SECONDS
        self._take_sample()
        while not self._stop_event.wait(every):
            self._take_sample()
            if len(self.samples) >= SAMPLES:
                del self.samples[1::2]
                every *= 2
        self._take_sample()

    def _take_sample(self) -> None:
        found = {"resident": int(self._process.memory_info().rss)}
        if _cuda.is_initialized():
            found |= {f"GPU {n}": _cuda.memory_allocated(n) for n in range(_cuda.device_count())}
        self.samples.append((time.monotonic(), found))


_NOTICES = b"External init callback must run in same thread", UNKNOWN_BLOCK
_LEVEL = "KINETO_LOG_LEVEL"


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Keep notices of torch off the error output; all else that is written there meanwhile is written afterwards."""
    # libkineto prints the first, once in a process, where another thread than the one that loaded torch starts the
    # profiler; it matters for MTIA devices only. Then, too, it reads whether to report each start and stop there.
    unset = _LEVEL not in os.environ
    os.environ.setdefault(_LEVEL, "99")
    kept = os.dup(2)
    with tempfile.TemporaryFile() as meanwhile:
        os.dup2(meanwhile.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            if unset:
                del os.environ[_LEVEL]
            meanwhile.seek(0)
            for line in meanwhile:
                if not any(notice in line for notice in _NOTICES):
                    os.write(2, line)
