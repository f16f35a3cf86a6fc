"""Records a world while it goes on, every change and every message, as panels see them: `with record("lesson.json"):`.

A thread of its own looks at most ten times a second, and after `mark`. What a record may hold is bounded: when that is
full nothing more is added, and the record says so.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType

from rpcbench.base.conditions import Flag
from rpcbench.base.events import MESSAGES
from rpcbench.telemetry import collect
from rpcbench.telemetry.collect import Collector
from rpcbench.telemetry.collectives import began_since
from rpcbench.telemetry.record import FORMAT, TABLES, VERSION, Cleaner, Frame, Record, flat
from rpcbench.telemetry.views import Delta, View, diff

PERIOD = 0.1
MOST_ROWS = 500_000


class Recording:
    """A record that grows, from when it is made until `stop`, which writes the file."""

    def __init__(self, path: str | Path, collector: Collector, everything: bool = False) -> None:
        self.path = Path(path)
        self.path.touch()  # whoever may not write there hears of it now
        self._collector = collector
        self._everything = everything
        self._cleaner = Cleaner()
        self._lock = threading.Lock()
        self._sections: View = {}
        self._frames: list[Frame] = []
        self._rows: Counter[str] = Counter()
        self._skipped: set[str] = set()
        self._full = False
        self._began = time.monotonic()
        self._stale, self._over = Flag(), Flag()
        self._unsubscribe = collector.subscribe(self._stale.set, MESSAGES)
        collector.settle()
        self.mark("begin")
        self._thread = threading.Thread(target=self._run, name="rpcbench-record", daemon=True)
        self._thread.start()

    def mark(self, name: str) -> None:
        """Look now, and give this moment a name."""
        self._look(name)

    def stop(self) -> Record:
        """Wait for what members have to tell, look once more and write the file."""
        if not self._over.is_set():
            self._collector.settle()
            self.mark("end")
            self._over.set()
            self._stale.set()
            self._unsubscribe()
            self._thread.join()
            self.record().save(self.path)
        return self.record()

    def record(self) -> Record:
        """What there is so far."""
        with self._lock:
            members = len(self._sections.get("members", {}))
            holds = {
                "members": members,
                "frames": len(self._frames),
                **{f"rows of {t}": n for t, n in self._rows.items() if n},
            }
            left_out = ["values of tensors"]
            if not self._everything:
                left_out += [
                    "environment",
                    "home paths",
                    "secrets",
                    *(f"table {name}" for name in sorted(self._skipped)),
                ]
            if self._full:
                left_out.append(f"what came after its first {MOST_ROWS} rows")
            about = {"format": FORMAT, "version": VERSION, "holds": holds, "leaves_out": left_out}
            return Record(about, tuple(self._frames))

    def _run(self) -> None:
        while not self._over.is_set():
            self._stale.wait()
            self._stale.clear()
            self._look("")
            self._over.wait(PERIOD)

    def _look(self, name: str) -> None:
        with self._lock:
            if self._over.is_set() or self._full:
                return
            world = {id_: began_since(member, self._began) for id_, member in self._collector.world().items()}
            self._skipped |= {t for member in world.values() for t in member["tables"]} - {*TABLES}
            sections = flat(world, None if self._everything else TABLES)
            delta = diff(self._sections, sections)
            if delta or name:
                self._count(delta)
                cleaned = delta if self._everything else self._cleaner.clean(delta)
                self._frames.append((time.monotonic() - self._began, cleaned, name))
                self._sections = sections

    def _count(self, delta: Delta) -> None:
        for section, change in delta.items():
            if change is not None and " " in section:
                self._rows[section.partition(" ")[2]] += len(change["set"])
        self._full = self._rows.total() > MOST_ROWS

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def record(path: str | Path, everything: bool = False) -> Recording:
    """Record the current world into a file, until `stop()` or the end of a `with`.

    `everything`: all tables and strings as they are, with paths, logs and whatever else is in them.
    RuntimeError where RPC is not initialized.
    """
    return Recording(path, collect.current(), everything)
