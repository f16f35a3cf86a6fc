"""Follows the logs of workers for panels, as a source of worlds.

Guarantees
- Nothing is read while nobody looks. While somebody does, each log is looked at once in `PERIOD` seconds, and only its
  new bytes are read: 15 µs for a log without any. No request goes to a worker, so the log of a lost, stopped or busy
  one is read like any other.
- Of each worker the last `MOST_LINES` lines are kept, of at most `MOST_BYTES` bytes.
- Lines of earlier incarnations of a worker, and of those that have been ended, stay. A line of our own tells when a
  worker was lost or restarted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import RpcError
from rpcbench.base.ids import Row, Table
from rpcbench.cells.log_reader import MOST_BYTES, LogReader
from rpcbench.cells.worker_log import log_path
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.status import WorkerRecord
from rpcbench.runtime import current as agents
from rpcbench.runtime.agent import Agent
from rpcbench.telemetry.collector import LIVE, Phase, Wake
from rpcbench.telemetry.log_view import ERROR, PLAIN, LevelFinder
from rpcbench.telemetry.views import PERIOD, World
from rpcbench.transport.hosts import host_id

MOST_LINES = 2_000
_BLOCK = 100  # lines in a block, the unit in which browsers get them
_SMALL = 50  # lines up to which a block grows
_GROWS = 5.0  # seconds in which it does


@dataclass(slots=True)
class _WorkerLog:
    """The log of one worker: what has been read of it, by all its incarnations."""

    id: int
    name: str
    incarnation: int = -1
    reader: LogReader | None = None
    missing: str = ""  # why there is no log
    lost: str = ""
    count: int = 0  # lines until now
    dropped: int = 0  # bytes
    held: int = 0  # bytes of `blocks`
    levels: LevelFinder = field(default_factory=LevelFinder)
    blocks: deque[Row] = field(default_factory=deque)

    def make_row(self) -> Row:
        path = "" if self.reader is None else str(self.reader.path)
        skipped = self.dropped + (0 if self.reader is None else self.reader.skipped)
        about = {"name": self.name, "path": path, "missing": self.missing, "lost": self.lost}
        return {**about, "skipped": skipped, "lines": self.count}

    def drop_oldest(self) -> None:
        while len(self.blocks) > 1 and (self.held > MOST_BYTES or self.count - self.blocks[1]["first"] >= MOST_LINES):
            size = _size_of(self.blocks.popleft()["lines"])
            self.held -= size
            self.dropped += size

    def begun_row(self, order: int) -> Row | None:
        """Return a block with the line that has no end yet."""
        if self.reader is None or not (line := self.reader.begun_line):
            return None
        return _make_block(self, [line], PLAIN, order + 1, None)


def _size_of(lines: list[str]) -> int:
    return sum(map(len, lines)) + len(lines)


def _make_block(log: _WorkerLog, lines: list[str], levels: str, order: int, at: float | None, kind: str = "") -> Row:
    about = {"worker": log.id, "kind": kind, "first": log.count, "order": order, "at": at}
    return {**about, "lines": lines, "levels": levels}


class LogFollower:
    """The lines of all workers of the cluster that owns an agent. One for each agent: `agent.part(LogFollower)`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards `_subscribers` and `_is_following`
        self._look_lock = threading.Lock()  # held during a look; guards what follows
        self._logs: dict[int, _WorkerLog] = {}
        self._order = 0  # of the last block
        self._has_looked = False
        self._subscribers: dict[object, Wake] = {}
        self._is_following = False  # whether the thread runs
        self._changes = Condition()  # wakes the thread so that it can end
        self.phase = LIVE
        agent.hooks.on_leave.append(self._agent_stopped)
        agent.hooks.on_end.append(self._agent_stopped)

    # -- as a source
    def subscribe(self, wake: Wake) -> Callable[[], None]:
        """Follow the logs until the end of the subscription, and call `wake` after each change."""
        key = object()
        with self._lock:
            self._subscribers[key] = wake
            begins, self._is_following = not self._is_following, True
        if begins:
            threading.Thread(target=self._follow, name="rpcbench-logs", daemon=True).start()

        def end_subscription() -> None:
            with self._lock:
                self._subscribers.pop(key, None)
            self._changes.notify_all()

        return end_subscription

    def settle(self, timeout: float = 0.0) -> bool:
        """Look at the logs now, while somebody does."""
        if self._subscribers:
            self._look_and_tell()
        return True

    def world(self) -> World:
        """Return the workers with the tables "log_files" and "log_lines"."""
        with self._look_lock:
            return {id_: self._make_member(log) for id_, log in sorted(self._logs.items())}

    def _make_member(self, log: _WorkerLog) -> dict[str, Any]:
        lines: Table = {f"{log.id}.{row['first']}.{row['order']}": row for row in log.blocks}
        if (begun := log.begun_row(self._order)) is not None:
            lines[f"{log.id} begun"] = begun
        tables = {"log_files": {str(log.id): log.make_row()}, "log_lines": lines}
        state = "lost" if log.lost else "up"
        about = {"name": log.name, "id": log.id, "incarnation": max(0, log.incarnation), "state": state, "left_out": 0}
        return {**about, "tables": tables}

    # -- the thread
    def _follow(self) -> None:
        while self._goes_on():
            self._look_and_tell()
            self._changes.wait_for(lambda: not self._subscribers or self.phase != LIVE, PERIOD)

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_following = bool(self._subscribers) and self.phase == LIVE
            return self._is_following

    def _agent_stopped(self) -> None:
        if self._subscribers:
            self._look_and_tell(is_last=self.phase == LIVE)  # also at the end: a worker that ends writes last lines
        self._changes.notify_all()

    def _look_and_tell(self, is_last: bool = False) -> None:
        with self._look_lock:
            before = self._fingerprint()
            with contextlib.suppress(RpcError):  # the cluster changes, or ends: the next look will tell
                self._look()
            if is_last:
                self.phase = Phase("stopped", time.time())
            has_changed = is_last or before != self._fingerprint()
        with self._lock:
            wakes = list(self._subscribers.values())
        for wake in wakes if has_changed else ():
            wake()

    def _fingerprint(self) -> list[object]:
        return [self._order, *((log.make_row(), log.reader and log.reader.begun_line) for log in self._logs.values())]

    # -- a look
    def _look(self) -> None:
        cluster = self._agent.owner
        if not isinstance(cluster, BaseCluster):
            return
        records = cluster.watched()
        at = time.time() if self._has_looked else None
        if not self._has_looked:  # lines from before are in the order in which the logs were written last
            records.sort(key=lambda record: _last_written(cluster, record.name))
        self._has_looked = True
        for record in records:
            log = self._logs.get(record.id)
            if log is None:
                log = self._logs[record.id] = _WorkerLog(record.id, record.name)
            if log.incarnation != record.incarnation:
                self._change_incarnation(log, record, cluster, at)
            self._read(log, at)
            if record.lost and not log.lost:
                self._end_line(log, at)
                self._add_event(log, f"{log.name} was lost: {record.lost}", at, ERROR)
            log.lost = record.lost
        for id_ in self._logs.keys() - {record.id for record in records}:
            self._read(self._logs[id_], at)  # `scale` has ended it

    def _change_incarnation(
        self, log: _WorkerLog, record: WorkerRecord, cluster: BaseCluster, at: float | None
    ) -> None:
        """Read the logs of earlier incarnations to their end, and go on to that of this one."""
        try:
            path, log.missing = cluster.find_log(record.name), ""
        except RpcError as error:
            path, log.missing = None, str(error)
        for incarnation in range(max(0, log.incarnation), record.incarnation):
            self._read(log, at, path and log_path(path.parent, record.name, incarnation))
            self._end_line(log, at)
            is_last = incarnation == record.incarnation - 1
            began = (at or _start_time(record)) if is_last else None
            when = f" at {time.strftime('%H:%M', time.localtime(began))}" if began else ""
            self._add_event(log, f"{log.name} was restarted{when}", began)
        log.incarnation = record.incarnation
        log.dropped += 0 if log.reader is None else log.reader.skipped
        log.reader, log.levels = None if path is None else LogReader(path), LevelFinder()

    def _read(self, log: _WorkerLog, at: float | None, path: Path | None = None) -> None:
        """Read the new lines of a log; with a path, of that one."""
        if path is not None and (log.reader is None or log.reader.path != path):
            log.dropped += 0 if log.reader is None else log.reader.skipped
            log.reader, log.levels = LogReader(path), LevelFinder()
        if log.reader is not None:
            self._add_lines(log, log.reader.read_lines(), at)

    def _end_line(self, log: _WorkerLog, at: float | None) -> None:
        """Add the line without an end of a process that has ended."""
        if log.reader is not None and (line := log.reader.end_line()):
            self._add_lines(log, [line], at)

    def _add_lines(self, log: _WorkerLog, lines: list[str], at: float | None) -> None:
        for begin in range(0, len(lines), _BLOCK):
            part = lines[begin : begin + _BLOCK]
            levels = log.levels.find_levels(part)
            last = log.blocks[-1] if log.blocks else None
            log.held += _size_of(part)
            if last is not None and self._may_grow(last, at):
                log.blocks[-1] = {**last, "lines": [*last["lines"], *part], "levels": last["levels"] + levels}
            else:
                self._order += 1
                log.blocks.append(_make_block(log, part, levels, self._order, at))
            log.count += len(part)
            log.drop_oldest()

    def _may_grow(self, last: Row, at: float | None) -> bool:
        is_new = at is not None and last["at"] is not None and at - last["at"] < _GROWS
        return is_new and last["order"] == self._order and not last["kind"] and len(last["lines"]) < _SMALL

    def _add_event(self, log: _WorkerLog, words: str, at: float | None, level: str = PLAIN) -> None:
        self._order += 1
        log.blocks.append(_make_block(log, [words], level, self._order, at, "event"))
        log.count += 1
        log.held += _size_of([words])


def _last_written(cluster: BaseCluster, name: str) -> float:
    with contextlib.suppress(RpcError, OSError):
        return cluster.find_log(name).stat().st_mtime
    return 0.0


def _start_time(record: WorkerRecord) -> float | None:
    """Return when a worker's process began; None if it is not there, or not on this host."""
    if record.lost or record.place.host != host_id():
        return None
    with contextlib.suppress(psutil.Error):
        return float(psutil.Process(record.place.pid).create_time())
    return None


def current_follower() -> LogFollower:
    """Return the follower of the current agent. Raises RuntimeError where RPC is not initialized."""
    return agents.current_agent().part(LogFollower)
