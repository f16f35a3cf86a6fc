"""What a cell writes, on its way from the worker to the member that asked.

Guarantees
- Items of one cell are numbered 0, 1, 2, … without gaps in the order they were written; the last one is `end`.
- Small writes are gathered for at most `GATHER_SECONDS`, then sent; what is long travels in pieces (`part`, `part`, …,
  then the item with the rest).
- The asker tells what it has shown. At most `WINDOW` notices are ahead of that: a flood slows its writer down instead
  of filling memory, and a stopped cell is silent soon. An asker that says nothing holds up each notice for a second.
- Any thread may write, also in a finalizer or while an interrupt is on its way: a write is one `SimpleQueue.put`, and
  only the sending thread numbers and sends. What is written while no cell runs goes to the worker's log.
- What C code and child processes write goes to the log, and with a `tail` of it to the cell, too: before what Python
  writes after it, and all of it before `end`.

Descriptors 1 and 2 stay those of the log, which is read back while a cell runs. So nothing that a process writes there
can block, is lost when the worker is killed, or has to pass through Python; a child that outlives the cell, or the
worker, goes on writing to the log. The log is open here only while there is something to read, as a worker may have no
descriptor to spare.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import RpcError
from rpcbench.launch.base import log_of

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """`passed`: how many items have been given out, and so the number of the next one."""

    def __init__(self) -> None:
        self.passed = 0
        self._early: dict[int, T] = {}

    def add(self, number: int, item: T) -> Iterator[T]:
        """The items that this one makes ready: none, one, or it and those that waited for it."""
        self._early[number] = item
        while self.passed in self._early:
            self.passed += 1
            yield self._early.pop(self.passed - 1)


MOST = 16 << 20
_AT_ONCE = 1 << 18
_OUT = 1


class LogTail:
    """The log from where a cell began, as text. One thread reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self.begin(self.size())

    def size(self) -> int:
        """How many bytes the log has now, or had before the world took it away at its end. From any thread."""
        with contextlib.suppress(FileNotFoundError):
            self._size = self._path.stat().st_size
        return self._size

    def begin(self, at: int) -> None:
        """What was written before position `at` belongs to no cell."""
        self.at = at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, until: int) -> Iterator[str]:
        """What was written up to position `until` and was not read yet. Of more than `MOST` bytes only the last."""
        if (left_out := until - self.at - MOST) > 0:
            self.begin(until - MOST)
            yield f"\n({left_out:,} bytes of output, too many at once, are only in the worker's log.)\n"
        with self._path.open("rb") as log:
            log.seek(self.at)
            while self.at < until and (data := log.read(min(_AT_ONCE, until - self.at))):
                self.at += len(data)
                if text := self._decoder.decode(data):
                    yield text


def log_tail(worker: str, incarnation: int) -> LogTail | None:
    """That of this worker. None where its output goes elsewhere: to torchrun, Ray, or through a connection; the file
    is known by its name, as others than this worker might write to any other file."""
    if not stat.S_ISREG(os.fstat(_OUT).st_mode) or (path := _path(_OUT)) != log_of(path.parent, worker, incarnation):
        return None
    return LogTail(path)


def _path(descriptor: int) -> Path:
    import fcntl

    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()


GATHER_SECONDS = 0.01
WINDOW = 32
_FULL = 10_000
_SILENCE_SECONDS = 1.0
_LONGEST = 1 << 18
_LOOK_SECONDS = 0.1
_TEXT = ("stdout", "stderr")
_LOGGED = "logged"
"""The log has grown to so many bytes."""
_LASTING = ("comm",)
"""What means something also when the cell is over that it came from."""
BESIDE = -1
"""Instead of the number of a cell: it belongs to none."""

Notice = dict[str, Any]


class CellKey(NamedTuple):
    """A cell as every process knows it: the member that asked, and that member's number for it."""

    asker: int
    number: int


_Item = tuple[CellKey, str, str]
"""Cell, kind, content. A plain tuple: an interrupt may come while one is made, and shows where it came."""


class OutputStream:
    """Gathers, numbers and sends what cells write. `notify(member id, notice)` does the sending."""

    def __init__(
        self, notify: Callable[[int, Notice], None], logs: dict[str, TextIO], tail: LogTail | None = None
    ) -> None:
        self._notify = notify
        self._logs = logs
        self._tail = tail
        self._logged = 0
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._room = threading.Lock()
        self._key: CellKey | None = None
        self._asker: int | None = None
        self._live: CellKey | None = None
        self._count = 0
        self._lock = threading.Lock()
        self._shown = Changes()
        self._shown_count = 0
        threading.Thread(target=self._send_for_ever, name="rpcbench-outbox", daemon=True).start()

    def begin(self, key: CellKey) -> None:
        """From here on everything written in this process belongs to this cell."""
        self._logged = self._tail.size() if self._tail else 0
        self._put((key, "begin", str(self._logged)))
        self._key, self._asker = key, key.asker

    def end(self, key: CellKey, content: str) -> None:
        """The cell is over: `content` is its last item."""
        self._look(key)
        self._key = None
        self._put((key, "end", content))

    @property
    def runs(self) -> bool:
        """Whether a cell does."""
        return self._key is not None

    def write(self, stream: str, text: str) -> None:
        """Text for "stdout" or "stderr" of the cell that runs; for the log if none does, or in a forked child."""
        key = self._key
        if key is None or os.getpid() != self._pid:
            self._log(stream, text)
            return
        self._look(key)
        self._put((key, stream, text))

    def show(self, kind: str, content: str) -> bool:
        """A display, a question or the like for the cell that runs. False if none does, or in a forked child."""
        key = self._key
        if key is None or os.getpid() != self._pid:
            return False
        self._put((key, kind, content))
        return True

    def tell(self, kind: str, content: str) -> None:
        """As `show`; while no cell runs it goes, beside all cells, to the member that asked for the last one."""
        asker = self._asker
        if asker is not None and os.getpid() == self._pid:
            self._put((self._key or CellKey(asker, BESIDE), kind, content))

    def shown(self, asker: int, notice: Notice) -> None:
        """The asker has shown this many notices of its cell. On a pool thread."""
        with self._lock:
            if self._live == (asker, notice["cell"]):
                self._shown_count = notice["shown"]
        self._shown.tell()

    def _look(self, key: CellKey) -> None:
        """Whatever the log has got meanwhile comes before what is put next."""
        if self._tail is not None and (size := self._tail.size()) != self._logged:
            self._logged = size
            self._put((key, _LOGGED, str(size)))

    def _put(self, item: _Item) -> None:
        self._queue.put(item)
        if self._queue.qsize() > _FULL and threading.current_thread().name != "rpcbench-outbox":
            self._room.acquire(timeout=_SILENCE_SECONDS)

    def _send_for_ever(self) -> None:
        while True:
            for item in _joined(self._read_back(self._gather())):
                self._send(*item)
            if self._room.locked():
                self._room.release()

    def _gather(self) -> Iterator[_Item]:
        """The next item and those that follow it closely, up to the first that is not text."""
        item = self._next()
        deadline = time.monotonic() + GATHER_SECONDS
        yield item
        while item[1] in (*_TEXT, _LOGGED) and (left := deadline - time.monotonic()) > 0:
            try:
                item = self._queue.get(timeout=left)
            except queue.Empty:
                return
            yield item

    def _next(self) -> _Item:
        """What is put next. While a cell runs that puts nothing, its log is looked at."""
        while (live := self._live) is not None and (tail := self._tail) is not None:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=_LOOK_SECONDS)
            if (size := tail.size()) > tail.at:
                return live, _LOGGED, str(size)
        return self._queue.get()

    def _read_back(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """The items, with the text of the log where it is meant."""
        for key, kind, content in items:
            if kind != _LOGGED:
                yield key, kind, content
            elif self._tail is not None and key == self._live:
                with contextlib.suppress(OSError):  # it has gone, or cannot be opened now: it is read later, or lost
                    yield from ((key, "stdout", text) for text in self._tail.read(int(content)))

    def _send(self, key: CellKey, kind: str, content: str) -> None:
        if kind == "begin":
            if self._tail is not None:
                self._tail.begin(int(content))
            self._begin(key)
        elif key == self._live:
            self._deliver(key, kind, content)
        elif kind in _LASTING:
            self._send_beside(key.asker, kind, content)
        else:
            self._log(kind, content)

    def _begin(self, key: CellKey | None) -> None:
        with self._lock:
            self._live, self._count, self._shown_count = key, 0, 0

    def _send_beside(self, asker: int, kind: str, content: str) -> None:
        with contextlib.suppress(RpcError):  # it is gone, and with it who could look
            self._notify(asker, {"cell": BESIDE, "n": 0, "kind": kind, "content": content})

    def _deliver(self, key: CellKey, kind: str, content: str) -> None:
        """Send an item, in pieces if need be."""
        text = content.encode("utf-8", "backslashreplace").decode()
        last = max(0, len(text) - 1) // _LONGEST * _LONGEST
        try:
            for start in range(0, last, _LONGEST):
                self._number(key, kind if kind in _TEXT else "part", text[start : start + _LONGEST])
            self._number(key, kind, text[last:])
        except RpcError as error:
            self._log("stderr", f"rpcbench: the member that asked for cell {key.number} is gone: {error}\n")
            self._begin(None)
        if kind == "end":
            self._begin(None)

    def _number(self, key: CellKey, kind: str, content: str) -> None:
        number, self._count = self._count, self._count + 1
        self._shown.wait_for(lambda: number - self._shown_count < WINDOW, _SILENCE_SECONDS)
        self._notify(key.asker, {"cell": key.number, "n": number, "kind": kind, "content": content})

    def _log(self, kind: str, text: str) -> None:
        if kind in _TEXT:
            self._logs[kind].write(text)
            self._logs[kind].flush()


def _joined(items: Iterator[_Item]) -> Iterator[_Item]:
    """Neighbouring texts of one stream of one cell as one item."""
    for (key, kind), group in itertools.groupby(items, key=lambda item: item[:2]):
        if kind in _TEXT:
            yield key, kind, "".join(item[2] for item in group)
        else:
            yield from group


class CellStream(io.TextIOBase):
    """The worker's `sys.stdout` or `sys.stderr`: text goes to the outbox, the file descriptor is the log's."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, name: str, outbox: OutputStream, log: TextIO) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._stream = name
        self._outbox = outbox
        self._log = log
        self._buffer = _CellBuffer(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._outbox.write(self._stream, text)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._log.fileno()

    @property
    def buffer(self) -> io.BufferedIOBase:
        return self._buffer


class _CellBuffer(io.BufferedIOBase):
    """`sys.stdout.buffer`: bytes are text in UTF-8, and come in order with what is printed."""

    def __init__(self, stream: CellStream) -> None:
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Any) -> int:
        self._stream.write(self._decoder.decode(memoryview(data).tobytes()))
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()
