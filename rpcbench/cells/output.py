"""The output of cells on a worker: gathers, numbers and sends it to the cell's client.

Guarantees
- The items of one cell, or of one call, are numbered 0, 1, 2, … without gaps in the order of writing; the last one is
  `end_cell`.
- Text is gathered for `GATHER_SECONDS`, and in a flood until `FLOOD_SECONDS` after the last sending: a page draws each
  item anew, and falls behind more than a few a second. A long item travels in pieces (`part`, …, then the rest).
- Backpressure: the client acknowledges the items that it has shown, and the worker sends at most `WINDOW` beyond these.
  A flood slows its writer down instead of filling memory, and a stopped cell is soon silent. A client that does not
  acknowledge delays each item by a second.
- Any thread may write, also in a finalizer or while an interrupt is pending: a write is one `SimpleQueue.put`, and only
  the output thread numbers and sends. A writer waits only for room in a full queue, at most a second and for no lock
  that a thread holds.
- Text that is written while no cell runs goes to the worker's log, and that of a call to the notebook as well, before
  the call is answered (`display.CallOutput`). So does text of a call that comes behind the end of a cell.
- Output of C code and child processes goes to the log, and through a `LogTail` to the cell: in order, before
  `end_cell`. Of an error of torch's C++ code the cell gets the message, and only the number of its frames.

Descriptors 1 and 2 remain those of the log, which is read back while a cell runs. So a write there never blocks, passes
through no Python code, and is not lost if the worker is killed; a child may outlive the cell or the worker.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import io
import itertools
import json
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

from rpcbench.base.conditions import Condition
from rpcbench.base.errors import RpcError
from rpcbench.base.futures import release_slot
from rpcbench.cells.worker_log import fold_frames, log_path
from rpcbench.runtime.pool import PoolThread

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """Puts numbered items that arrive in any order into order."""

    def __init__(self) -> None:
        self.passed = 0  # items given out, and so the number of the next one
        self._early: dict[int, T] = {}

    def add_item(self, number: int, item: T) -> Iterator[T]:
        """Yield the items that are now in order: none, this one, or it and later ones that arrived before it."""
        self._early[number] = item
        while self.passed in self._early:
            self.passed += 1
            yield self._early.pop(self.passed - 1)


MOST = 16 << 20  # bytes read back at once
_AT_ONCE = 1 << 18  # bytes of one item
_OUT = 1  # the descriptor of stdout
_CONTINUATION = bytes(range(0x80, 0xC0))  # all bytes of a character in UTF-8 but the first


class LogTail:
    """The worker's log from the position where a cell began, as text. Only the output thread reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self.skip_to(self.log_size())

    def log_size(self) -> int:
        """Return the size of the log in bytes. From any thread."""
        with contextlib.suppress(FileNotFoundError):  # the world removes it at its end
            self._size = self._path.stat().st_size
        return self._size

    def skip_to(self, at: int) -> None:
        """Skip the log up to position `at`, which belongs to no cell."""
        self.at = at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read_text(self, until: int) -> Iterator[str]:
        """Yield the text between the last position and `until`; of more than `MOST` bytes only the last."""
        if cut := (left_out := until - self.at - MOST) > 0:
            self.skip_to(until - MOST)
            yield f"\n({left_out:,} bytes of output, too many at once, are only in the worker's log.)\n"
        with self._path.open("rb") as log:  # not kept open: a worker may have no descriptor to spare
            log.seek(self.at)
            while self.at < until and (data := log.read(min(_AT_ONCE, until - self.at))):
                self.at += len(data)
                if cut:  # perhaps within a character: skip its rest
                    data, cut = data.lstrip(_CONTINUATION), False
                if text := fold_frames(self._decoder.decode(data)):  # C++ writes an error with its frames at once
                    yield text


def find_log_tail(worker: str, incarnation: int) -> LogTail | None:
    """Return this worker's log; None if its output goes elsewhere: to torchrun, Ray, or through a connection."""
    # The file must have the name of this worker's log: other processes may write to any other file.
    if not stat.S_ISREG(os.fstat(_OUT).st_mode) or (path := _path_of_descriptor(_OUT)) != log_path(
        path.parent, worker, incarnation
    ):
        return None
    return LogTail(path)


def _path_of_descriptor(descriptor: int) -> Path:
    import fcntl

    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()


GATHER_SECONDS = 0.01
FLOOD_SECONDS = 0.2  # as ipykernel does
WINDOW = 32  # items sent beyond the last acknowledged one
_FULL = 10_000  # queued items from which on writers are slowed down
_ACK_SECONDS = 1.0  # the longest wait for an acknowledgement, or for room in the queue
_LONGEST = 1 << 18  # characters of one piece
_LOOK_SECONDS = 0.1  # how often the log is looked at while a cell writes nothing through Python
_TEXT = ("stdout", "stderr")
_LOGGED = "logged"  # the kind of an item whose content is the new size of the log
_LASTING = ("comm",)  # kinds that are sent even if the cell that they came from has ended
NO_CELL = -1  # the number of the cell in an item that belongs to none
SHOWN = "shown"  # the channel of acknowledgements, client → worker
_NOTEBOOK = 0  # the member id of the client that shows the output of calls
_CALL_ENDS = json.dumps({"error": None, "traceback": []})  # the content of a call's last item, which is like a cell's

Notice = dict[str, Any]


class CellKey(NamedTuple):
    """The identity of a cell in all processes."""

    client_id: int  # member id of the client
    number: int  # counted by the client


class _DuringCell(CellKey):
    """The key of a cell during which a call writes. `call`: the call's own, for text behind the end of the cell."""

    call: CellKey


def is_call_number(number: int) -> bool:
    """Return whether a number of a cell is that of a call on a worker, which the worker has counted downwards."""
    return number < NO_CELL


class _Series:
    """The items of one cell or call on their way to its client."""

    def __init__(self, key: CellKey) -> None:
        self.key = key
        self.count = self.shown = 0  # items sent, and items that the client has acknowledged
        self.ended = False  # the last item was sent, or the client has left
        self.given_up = False  # no thread waits, or will, for the client to show the last item

    def is_shown(self) -> bool:
        """Return whether the client has shown all, or has left."""
        return self.ended and self.shown >= self.count


_Item = tuple[CellKey, str, str]
"""Cell, kind, content. A plain tuple: an interrupt in a constructor would show its frame in the cell's traceback."""


class OutputStream:
    """The output of this process's cells and calls. `notify(member id, notice)` sends an item."""

    def __init__(
        self,
        notify: Callable[[int, Notice], None],
        logs: dict[str, TextIO],
        tail: LogTail | None = None,
        incarnation: int = 0,
    ) -> None:
        self._notify = notify
        self._logs = logs
        self._tail = tail
        self._logged = 0  # size of the log at the last look
        self._gathered = float("-inf")  # when the last items were gathered, in monotonic seconds
        self._pid = os.getpid()  # a forked child has no output thread
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._room = threading.Lock()  # taken by writers while the queue is full; the output thread releases it
        self._key: CellKey | None = None  # the cell whose code runs: writers read it
        self._client_id: int | None = None  # the client of the last cell
        self._live: CellKey | None = None  # the cell whose items the output thread sends, behind `_key`
        self._series: dict[CellKey, _Series] = {}  # of `_live`, and of calls; each step is atomic
        self._shown = Condition()  # notified when a series changes
        self._this_thread = threading.local()  # `series`: of the call that writes on this thread
        # Offset: the client never takes a call for one of this worker's earlier process.
        self._call_numbers = itertools.count(NO_CELL - 1 - (incarnation << 32), -1)
        threading.Thread(target=self._send_for_ever, name="rpcbench-output", daemon=True).start()

    def begin_cell(self, key: CellKey) -> None:
        """Assign all output of this process to this cell from now on."""
        self._logged = self._tail.log_size() if self._tail else 0
        self._enqueue_item((key, "begin", str(self._logged)))
        self._key, self._client_id = key, key.client_id

    def end_cell(self, key: CellKey, content: str) -> None:
        """End the cell's output with `content` as its last item."""
        self._queue_log_growth(key)
        self._key = None
        self._enqueue_item((key, "end", content))

    @property
    def has_running_cell(self) -> bool:
        return self._key is not None

    def write(self, stream: str, text: str) -> None:
        """Write text to "stdout" or "stderr" of the running cell; to the log if none runs, or in a forked child."""
        if os.getpid() != self._pid:
            self._write_to_log(stream, text)
            return
        call = self._call_here() if isinstance(threading.current_thread(), PoolThread) else None
        if (key := self._key) is None:
            self._write_to_log(stream, text)
            if call is not None:
                self._enqueue_item((call, stream, text))
            return
        self._queue_log_growth(key)
        if call is not None:
            key = _DuringCell(*key)
            key.call = call
        self._enqueue_item((key, stream, text))

    def _call_here(self) -> CellKey:
        """Return the key of the call that writes on this thread of the pool."""
        series: _Series | None = getattr(self._this_thread, "series", None)
        if series is None:
            key = CellKey(_NOTEBOOK, next(self._call_numbers))
            series = self._this_thread.series = self._series[key] = _Series(key)
        return series.key

    def wait_until_shown(self) -> None:
        """Wait until the notebook has shown what this thread of the pool has written, for `_ACK_SECONDS` at most; in a
        forked child, where no acknowledgement arrives, return at once."""
        series: _Series | None = getattr(self._this_thread, "series", None)
        if series is None or os.getpid() != self._pid:
            return
        self._this_thread.series = None
        self._enqueue_item((series.key, "end", _CALL_ENDS))
        with release_slot():
            self._shown.wait_for(series.is_shown, _ACK_SECONDS)
        series.given_up = True
        if series.ended:  # else the output thread forgets it
            self._series.pop(series.key, None)

    def wait_until_calls_shown(self) -> None:
        """Like `wait_until_shown`, for what all threads of the pool have written: the continuations of a call may have
        run on any."""
        if not any(is_call_number(key.number) for key in list(self._series)) or os.getpid() != self._pid:
            return
        self._call_here()  # its end is sent behind all that was written before
        self.wait_until_shown()
        sent = [(series, series.count) for series in list(self._series.values()) if is_call_number(series.key.number)]
        with release_slot():
            self._shown.wait_for(lambda: all(series.shown >= count for series, count in sent), _ACK_SECONDS)

    def send_item(self, kind: str, content: str) -> bool:
        """Send a display, a question or the like of the running cell; False if none runs, or in a forked child."""
        key = self._key
        if key is None or os.getpid() != self._pid:
            return False
        self._enqueue_item((key, kind, content))
        return True

    def send_to_last_client(self, kind: str, content: str) -> None:
        """Like `send_item`; if no cell runs, send it to the last cell's client, outside all cells."""
        client_id = self._client_id
        if client_id is not None and os.getpid() == self._pid:
            self._enqueue_item((self._key or CellKey(client_id, NO_CELL), kind, content))

    def items_shown(self, client_id: int, notice: Notice) -> None:
        """Take the client's acknowledgement of the items that it has shown. On a pool thread."""
        if (series := self._series.get(CellKey(client_id, notice["cell"]))) is not None:
            series.shown = max(series.shown, notice["shown"])
            self._shown.notify_all()

    def _queue_log_growth(self, key: CellKey) -> None:
        """Queue the growth of the log, so that it precedes the next item."""
        if self._tail is not None and (size := self._tail.log_size()) != self._logged:
            self._logged = size
            self._enqueue_item((key, _LOGGED, str(size)))

    def _enqueue_item(self, item: _Item) -> None:
        self._queue.put(item)
        # Not an exact bound: the first acquire succeeds at once, later ones wait for the output thread to release.
        if self._queue.qsize() > _FULL and threading.current_thread().name != "rpcbench-output":
            self._room.acquire(timeout=_ACK_SECONDS)

    def _send_for_ever(self) -> None:
        while True:
            for item in _join_texts(self._read_back(self._gather_items())):
                self._route_item(*item)
            if self._room.locked():
                self._room.release()

    def _gather_items(self) -> Iterator[_Item]:
        """Yield the next item and, if it is text, also the text behind it, up to a piece, and the next other item."""
        yield (item := self._next_item())
        if not (length := _text_length(item)):
            return
        deadline = max(time.monotonic() + GATHER_SECONDS, self._gathered + FLOOD_SECONDS)
        while _text_length(item) and length < _LONGEST and (left := deadline - time.monotonic()) > 0:
            try:
                item = self._queue.get(timeout=left)
            except queue.Empty:
                break
            yield item
            length += _text_length(item)
        self._gathered = time.monotonic()

    def _next_item(self) -> _Item:
        """Return the next item. While a cell runs without one, look at the log."""
        while (live := self._live) is not None and (tail := self._tail) is not None:
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=_LOOK_SECONDS)
            size = tail.log_size()
            with contextlib.suppress(queue.Empty):  # an item of Python that precedes the growth of the log
                return self._queue.get_nowait()
            if size > tail.at:
                return live, _LOGGED, str(size)
        return self._queue.get()

    def _read_back(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Replace items that stand for growth of the log by its text."""
        for key, kind, content in items:
            if kind != _LOGGED:
                yield key, kind, content
            elif self._tail is not None and key == self._live:
                with contextlib.suppress(OSError):  # removed, or no descriptor to spare now: read later, or lost
                    yield from ((key, "stdout", text) for text in self._tail.read_text(int(content)))

    def _route_item(self, key: CellKey, kind: str, content: str) -> None:
        if kind == "begin":
            if self._tail is not None:
                self._tail.skip_to(int(content))
            self._live, self._series[key] = key, _Series(key)
        elif key == self._live or is_call_number(key.number):
            self._deliver_item(key, kind, content)
        elif isinstance(key, _DuringCell):
            self._write_to_log(kind, content)
            self._deliver_item(key.call, kind, content)
        elif kind in _LASTING:
            with contextlib.suppress(RpcError):  # the client has left
                self._notify(key.client_id, {"cell": NO_CELL, "n": 0, "kind": kind, "content": _make_sendable(content)})
        else:  # written by a thread of a cell that has ended
            self._write_to_log(kind, content)

    def _end_series(self, series: _Series) -> None:
        """Forget a series of which no more items will be sent."""
        series.ended = True
        self._series.pop(series.key, None)
        if series.key == self._live:
            self._live = None
        self._shown.notify_all()

    def _deliver_item(self, key: CellKey, kind: str, content: str) -> None:
        """Send an item, a long one in pieces."""
        if (series := self._series.get(key)) is None:
            return  # of a call whose client has left; the log has the text
        text = _make_sendable(content)
        last = max(0, len(text) - 1) // _LONGEST * _LONGEST
        try:
            for start in range(0, last, _LONGEST):
                self._send_numbered(series, kind if kind in _TEXT else "part", text[start : start + _LONGEST])
            self._send_numbered(series, kind, text[last:])
        except RpcError as error:
            if key == self._live:
                self._write_to_log("stderr", f"rpcbench: the client of cell {key.number} has left: {error}\n")
            series.shown = series.count
            self._end_series(series)
        if kind == "end" and (series.given_up or key == self._live):
            self._end_series(series)

    def _send_numbered(self, series: _Series, kind: str, content: str) -> None:
        (client_id, cell), number = series.key, series.count
        series.count += 1
        # Bounded, so that a client which has stopped acknowledging does not stop the cell.
        self._shown.wait_for(lambda: number - series.shown < WINDOW, _ACK_SECONDS)
        series.ended = kind == "end"
        self._notify(client_id, {"cell": cell, "n": number, "kind": kind, "content": content})

    def _write_to_log(self, kind: str, text: str) -> None:
        if kind in _TEXT:
            self._logs[kind].write(text)
            self._logs[kind].flush()


def _text_length(item: _Item) -> int:
    """Return the characters of a text, and 0 of any other item. Growth of the log counts, though its text is unread."""
    return len(item[2]) if item[1] in (*_TEXT, _LOGGED) else 0


def _make_sendable(text: str) -> str:
    """Return text without lone surrogates, which cannot be sent."""
    return text.encode("utf-8", "backslashreplace").decode()


def json_with_bytes(content: dict[str, Any], complaint: str) -> str:
    """Return JSON, with bytes in base64. Raises TypeError with `complaint`, where `{}` is the type that JSON lacks."""

    def encode_bytes(value: object) -> str:
        if isinstance(value, bytes):
            return base64.b64encode(value).decode("ascii")
        raise TypeError(complaint.format(type(value).__name__))

    return json.dumps(content, default=encode_bytes)


def _join_texts(items: Iterator[_Item]) -> Iterator[_Item]:
    """Merge adjacent texts of one stream of one cell, and of one call, into one item."""
    for (key, kind, _), group in itertools.groupby(items, key=lambda item: (*item[:2], getattr(item[0], "call", None))):
        if kind in _TEXT:
            yield key, kind, "".join(item[2] for item in group)
        else:
            yield from group


class CellStream(io.TextIOBase):
    """The worker's `sys.stdout` or `sys.stderr`: writes to the output stream; its file descriptor is the log's."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, name: str, output_stream: OutputStream, log: TextIO) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._stream = name
        self._output_stream = output_stream
        self._log = log
        self._buffer = _CellBuffer(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output_stream.write(self._stream, text)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._log.fileno()

    @property
    def buffer(self) -> io.BufferedIOBase:
        return self._buffer


class _CellBuffer(io.BufferedIOBase):
    """`sys.stdout.buffer`: takes bytes as UTF-8 text, in order with printed text."""

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
