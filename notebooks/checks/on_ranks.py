"""Runs an answer on the workers, as the ranks of a process group, for checks: `run_on_ranks(program, answer, given)`.

On each worker runs `program(answer, *given[rank])`, where the program is a function of a check, and `call_answer` the
simplest one. `Run` has the results by rank, and the collectives and messages of each rank as a trace has seen them.

An error of the answer becomes a hint with the rank and the line. So does an answer that hangs: all ranks that have not
returned wait, and their main threads compute nothing for `STILL` seconds; the hint says for which rank they wait.

A rank that waits inside of torch may not end when it is interrupted. No answer can run there before the worker is
restarted: the hint says so, and so does that of each later answer.
"""

from __future__ import annotations

import contextvars
import linecache
import signal
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

import rpcbench
import rpcbench.rpc as rpc
from checks import NotYet, require, trying
from rpcbench.telemetry.message_views import collectives_view

STILL = 5.0  # seconds without computing, of all ranks that have not returned
MOST = 50.0  # seconds for an answer that computes for ever
BUSY = 0.05  # of the time: a main thread that waits computes less
POLL = 0.25
TRANSFERS = ("send", "recv")
WAITING = ("torch", "rpcbench", "threading")  # packages with code that waits
ANSWER = 3.0  # seconds in which a worker reports that lets other threads run
ENDS = 2.0  # seconds in which an answer that was interrupted ends, or it will not
GROUP_MAKERS = ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "init_device_mesh")  # functions of torch


@dataclass(frozen=True)
class Call:
    """A collective that a rank has called, or a message that it has sent."""

    op: str  # "all_reduce", "send"
    size: int  # bytes of the rank's tensor; of a collective in which ranks have unequal ones, those of one rank
    to: int | None = None  # the rank to which a message goes


@dataclass
class Run:
    """The deeds of a program. Both lists are by rank; calls are in the order in which they began."""

    values: list[Any]
    calls: list[list[Call]] = field(default_factory=list)

    def ops(self, rank: int) -> Counter[str]:
        """How many calls of each kind a rank has made."""
        return Counter(call.op for call in self.calls[rank])


def call_answer(answer: Callable[..., Any], *args: Any) -> Any:
    return answer(*args)


def run_on_ranks(program: Callable[..., Any], answer: Any, given: Sequence[tuple[Any, ...]]) -> Run:
    """Run `program(answer, *given[rank])` on the first workers, one for each rank that has something given."""
    workers = rpcbench.cluster().workers[: len(given)]
    require(len(workers) == len(given), _how_to_have(len(given)))
    require(not (former := _why_not_free(workers)), former)
    token = uuid.uuid4().hex
    watch = Watch(token, workers)
    try:
        with rpcbench.trace() as seen, watch:
            values = rpcbench.cluster().spmd(attempt, token, program, answer, list(given), workers=workers)
    except KeyboardInterrupt:
        if not watch.told:
            raise
        raise NotYet(f"{watch.told} {_why_not_free(workers)}".rstrip()) from None
    except rpcbench.RpcError as error:
        raise NotYet(_why_lost(workers) or _why_failed(token, workers) or _instructed(error)) from None
    except Exception:
        with trying("On the ranks it"):
            require(not (told := _why_lost(workers) or _why_failed(token, workers)), told)
            raise
    return Run(values, _calls_by_rank(seen.world, workers))


def _why_lost(workers: Sequence[str]) -> str:
    """The rank that has ended: the others fail for that, and their errors say less."""
    lost = [rank for rank, name in enumerate(workers) if name in rpcbench.cluster().lost]
    if not lost:
        return ""
    ranks = " and ".join(f"rank {rank} ({workers[rank]})" for rank in lost)
    start = f"`%cluster scale {len(workers)}` starts it again."
    return f"The process of {ranks} has ended while your answer ran there: {start}"


def _how_to_have(size: int) -> str:
    lost = rpcbench.cluster().lost
    names, verb = " and ".join(lost), "is" if len(lost) == 1 else "are"
    gone = f"{names} {verb} lost, perhaps by an answer before. " if lost else ""
    return f"{gone}{size} workers are needed: `%cluster scale {size}`."


def _why_not_free(workers: Sequence[str]) -> str:
    """The ranks that still run an answer which was interrupted, and the way out."""
    until = time.monotonic() + ENDS
    while (busy := _still_running(workers)) and time.monotonic() < until:
        time.sleep(POLL)
    if not busy:
        return ""
    ranks, verb = ("Rank", "runs") if len(busy) == 1 else ("Ranks", "run")
    names = " ".join(workers[rank] for rank in busy)
    return (
        f"{ranks} {' and '.join(map(str, busy))} still {verb} the answer that hangs: it waits inside of torch, where "
        f"no interrupt ends it. Nothing else can run there before `%cluster restart {names}`."
    )


def _still_running(workers: Sequence[str]) -> list[int]:
    futures = [rpc.rpc_async(name, runs_an_answer, timeout=ANSWER) for name in workers]
    return [rank for rank, future in enumerate(futures) if _is_true(future)]


def _is_true(future: Any) -> bool:
    try:
        return bool(future.wait())
    except rpcbench.RpcError:  # it is late, or lost: the run itself tells of that
        return False


def _instructed(error: Exception) -> str:
    if "in a process group already" in str(error):
        return (
            "The check makes a process group of its own, and the workers are in one: run `%remote all import torch; "
            "torch.distributed.destroy_process_group()` first."
        )
    return f"The ranks could not run: {error}"


def _calls_by_rank(world: Any, workers: Sequence[str]) -> list[list[Call]]:
    view = collectives_view(world)
    names = {key: worker["name"] for key, worker in view["workers"].items()}
    calls: dict[str, list[tuple[float, Call]]] = {name: [] for name in workers}
    for entry in view["entries"].values():
        row, name = view["collectives"][entry["collective"]], names[str(entry["worker"])]
        op = row["op"].partition("(")[0]
        if name not in calls or (op in TRANSFERS and row["members"][0] != name):
            continue  # a message is a call of its sender
        to = workers.index(row["members"][1]) if op in TRANSFERS else None
        call = Call("send" if op in TRANSFERS else op, row["bytes"], to)
        calls[name].append((entry["begin"], call))
    return [[call for _, call in sorted(calls[name], key=lambda pair: pair[0])] for name in workers]


# -- answers that hang
@dataclass(frozen=True)
class Report:
    """How far a rank has come."""

    done: bool  # it has returned, or failed
    line: str  # of the answer, where it is
    place: int  # of its main thread; another number once that has gone on
    seconds: float  # of computing, of its main thread
    failed: str = ""
    at: float = 0.0  # when it has failed
    groups: bool = False  # it makes a process group


class Watch:
    """Interrupts a run in which no rank will ever go on, as Ctrl-C does; `told` says why."""

    def __init__(self, token: str, workers: Sequence[str]) -> None:
        self.told = ""
        self._token, self._workers = token, workers
        self._over = threading.Event()
        self._ending = threading.Lock()
        look = contextvars.copy_context()  # the current cluster is that of this thread
        self._thread = threading.Thread(target=look.run, args=(self._look,), daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._ending:  # an interrupt that is under way arrives before
            self._over.set()

    def _look(self) -> None:
        began = since = time.monotonic()
        before: list[Report | None] = []
        while not self._over.wait(POLL):
            now, reports = time.monotonic(), _ask(self._token, self._workers)
            if not before or not _all_wait(before, reports, now - since):
                before, since = reports, now
            elif now - since > STILL:
                self._end(_why_hanging(reports, self._workers))
            if now - began > MOST:
                self._end(_why_endless(reports))

    def _end(self, told: str) -> None:
        with self._ending:
            if not self._over.is_set():
                self._over.set()
                self.told = told
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _ask(token: str, workers: Sequence[str]) -> list[Report | None]:
    """A report of each rank; None of one that has not begun, or lets no other thread run."""
    reports: list[Report | None] = []
    for future in [rpc.rpc_async(name, report, args=(token,), timeout=ANSWER) for name in workers]:
        try:
            reports.append(future.wait())
        except rpcbench.RpcError:  # it is late, or lost: the run itself tells of that
            reports.append(None)
    return reports


def _all_wait(before: Sequence[Report | None], reports: Sequence[Report | None], seconds: float) -> bool:
    """Whether each rank has begun and those that have not returned have stayed where they were without computing."""
    pairs = list(zip(before, reports, strict=True))
    if all(now is not None and now.done for now in reports):
        return False
    return all(
        then is not None and now is not None and then.done == now.done and then.place == now.place
        and (now.done or now.seconds - then.seconds < BUSY * max(seconds, 1.0))
        for then, now in pairs
    )  # fmt: skip


def _why_hanging(reports: Sequence[Report | None], workers: Sequence[str]) -> str:
    waits = [rank for rank, report in enumerate(reports) if report is not None and not report.done]
    rank = waits[0]
    line = reports[rank].line  # type: ignore[union-attr]
    where = f" in your line `{line}`" if line else ""
    gone = [str(other) for other in range(len(workers)) if other not in waits]
    others = f"rank {' and '.join(gone)} {'has' if len(gone) == 1 else 'have'} returned already" if gone else ""
    others = others or "the others wait, too"
    told = f"{len(workers)} ranks: rank {rank} waits{where}{_for_whom(rank, workers)} for ever; {others}."
    return told + _for_groups(reports)


def _for_groups(reports: Sequence[Report | None]) -> str:
    """The reason, if a rank waits where it makes a group."""
    if not any(report is not None and report.groups and not report.done for report in reports):
        return ""
    return (
        " All ranks make a group together: each of them must make all groups, also those of which it is no member, in "
        "the same order."
    )


def _for_whom(rank: int, workers: Sequence[str]) -> str:
    """ " for rank 3", from the collectives that are under way."""
    rows = rpcbench.collectives().rows.values()
    mine = [row for row in rows if row["state"] == "open" and workers[rank] in row["members"]]
    mine = [row for row in mine if row["missing"] and workers[rank] not in row["missing"]]
    if not mine:
        return ""
    missing = [str(workers.index(name)) for name in mine[-1]["missing"] if name in workers]
    return f" for rank {' and '.join(missing)}"


def _why_endless(reports: Sequence[Report | None]) -> str:
    busy = [(rank, report) for rank, report in enumerate(reports) if report is None or not report.done]
    rank, report = busy[0] if busy else (0, None)
    where = f", now in your line `{report.line}`" if report is not None and report.line else ""
    return f"Rank {rank} has run for {MOST:g} seconds{where}, and was interrupted. Does each loop end?"


def _why_failed(token: str, workers: Sequence[str]) -> str:
    """The error of the rank that failed first; of ranks that failed alike, the lowest."""
    failures = [
        (report.at, rank, report.failed)
        for rank, report in enumerate(_ask(token, workers))
        if report is not None and report.failed
    ]
    if not failures:
        return ""
    first = min(failures)[2]
    rank = min(rank for _, rank, failed in failures if failed == first)
    return _with_rank(first, rank, len(workers))


def _with_rank(told: str, rank: int, size: int) -> str:
    """A hint of `attempt`, which is the same on all ranks that fail alike, as the hint of one rank."""
    return told.replace("RANK", f"rank {rank} of {size}", 1)


# -- on workers
@dataclass
class _State:
    token: str = ""
    done: bool = False
    failed: str = ""
    at: float = 0.0


_state = _State()


def attempt(token: str, program: Callable[..., Any], answer: Any, given: Sequence[tuple[Any, ...]]) -> Any:
    """Run the program on this rank, and keep its error for `report`."""
    global _state
    _state = state = _State(token)
    try:
        with trying("On RANK it"):
            return program(answer, *given[dist.get_rank()])
    except NotYet as hint:
        state.failed, state.at = str(hint), time.monotonic()
        raise NotYet(_with_rank(state.failed, dist.get_rank(), len(given))) from None  # the worker shows it, too
    finally:
        state.done = True


def report(token: str) -> Report | None:
    """How far the main thread of this worker has come."""
    state = _state
    if state.token != token:
        return None
    main = threading.main_thread().ident or 0
    seconds = time.clock_gettime(time.pthread_getcpuclockid(main))
    frames = list(traceback.walk_stack(sys._current_frames()[main]))
    inner = frames[: next((n for n, (frame, _) in enumerate(frames) if frame.f_code is attempt.__code__), 0)]
    own = [frame for frame, _ in inner if frame.f_globals.get("__name__", "").partition(".")[0] not in WAITING]
    place = hash(tuple((id(frame), frame.f_lasti) for frame in own))  # below it a wait may look again and again
    groups = any(frame.f_code.co_name in GROUP_MAKERS for frame, _ in inner)
    return Report(state.done, _line(inner), place, seconds, state.failed, state.at, groups)


def runs_an_answer() -> bool:
    """Whether the main thread of this worker is within an answer."""
    return bool(_state.token) and not _state.done


def _line(frames: Sequence[tuple[Any, int]]) -> str:
    """The innermost line of a cell."""
    for frame, number in frames:
        if frame.f_globals.get("__name__") == "__main__":
            return linecache.getline(frame.f_code.co_filename, number).strip()
    return ""
