"""The view of the logs panel: the lines that workers wrote outside cells, each with its level; and its words.

Guarantees
- The level of a line follows from the rules of `LevelFinder` alone, which the panel's help tells.
- Lines of several workers are in the order in which they were seen, not in that in which they were written: a log has
  no times. Of one worker they are in the order of its log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row
from rpcbench.telemetry.views import View, World, rows_of, worker_rows

PLAIN, WARNING, ERROR = " ", "w", "e"
MORE_WARNING, MORE_ERROR = "v", "f"
"""The levels of lines: one character for each line of a block. A line that goes on with the warning or error above it
has a level of its own, so that these are counted, and not their lines."""
LAST_LINES = 12  # of all, in the text
_WIDEST = 160  # characters of a line of the text
_BEGINNING = 80  # characters of a line in which the word of a level counts
_RANK = r"(?:\[rank\d+\]:\s?)?"  # as torch puts it ahead
_ERROR = re.compile(
    rf"{_RANK}\[[EF]\d{{4}}[ \]]|.{{0,{_BEGINNING}}}?(?<![\w.])(?:ERROR|CRITICAL|FATAL)(?![\w.])"
    rf"|{_RANK}(?:[\w.]+\.)?\w*(?:Error|Exception|KeyboardInterrupt|SystemExit)(?::|\Z)"
    rf"|{_RANK}(?:Fatal Python error|Exception ignored in|Exception in thread|terminate called|Segmentation fault)"
)
_WARNING = re.compile(
    rf"{_RANK}\[W\d{{4}}[ \]]|.{{0,{_BEGINNING}}}?(?<![\w.])(?:WARNING|WARN)(?![\w.])"
    r"|(?:.{0,400}[\s:])?\w*Warning:"
)
_TRACEBACK = re.compile(rf"(?:.*\s)?{_RANK}Traceback \(most recent call last\):\Z")
_CHAINED = "The above exception was the direct cause of", "During handling of the above exception"


class LevelFinder:
    """Finds the levels of a log's lines, one after the other.

    An error: a line that begins with the name of an exception, as `ValueError: …`, or with torch's `[E0131 …]`; with
    ERROR, CRITICAL or FATAL, in capitals, near its beginning, as Python's logging writes it; a traceback with the line
    of its exception; a crash, as `Fatal Python error`, with all that follows. A warning: `…Warning: …`, and the line of
    code below it; WARNING near the beginning; torch's `[W0131 …]`.
    """

    def __init__(self) -> None:
        self._inside = ""  # "traceback", "warning", "abort", or "crash", until the end of the log
        self._may_have_traceback = False  # the last line was an error, which a traceback may belong to

    def find_level(self, line: str) -> str:
        """Return the level of the next line."""
        level = self._level_of(line)
        if line:
            self._may_have_traceback = level == ERROR or line.startswith(_CHAINED)
        return level

    def _level_of(self, line: str) -> str:
        inside, is_indented = self._inside, line[:1] in (" ", "\t")
        if inside == "crash":
            return MORE_ERROR
        if inside == "traceback":
            text = re.sub(rf"\A{_RANK}", "", line)
            if text[:1] not in (" ", "\t", ""):  # the line of the exception
                self._inside = ""
            return MORE_ERROR
        self._inside = ""
        if inside and is_indented:
            return MORE_WARNING if inside == "warning" else MORE_ERROR
        if _TRACEBACK.match(line):
            self._inside = "traceback"
            return MORE_ERROR if self._may_have_traceback else ERROR
        if _ERROR.match(line):
            self._inside = "crash" if "Fatal Python error" in line else "abort" if "terminate called" in line else ""
            return ERROR
        if _WARNING.match(line):
            self._inside = "warning" if "Warning:" in line else ""
            return WARNING
        return MORE_ERROR if line.startswith(_CHAINED) else PLAIN

    def find_levels(self, lines: Iterable[str]) -> str:
        return "".join(map(self.find_level, lines))


def logs_view(world: World) -> View:
    """Return the lines of all workers. Sections: workers, logs of workers as `files`, blocks of `lines`.

    `files` (by worker): its `name`, the `path` of its log, `missing`: the reason if it has none here, `lost`: how the
    worker was lost, or "", `skipped`: bytes that are not shown, and the number of its `lines` until now. `lines`, by a
    key: a block of `lines` of a `worker` with a level each in `levels`, the number of the `first` of them, `order`
    among the blocks of all workers, `at`: when they were read, or None of lines from before that, and `kind`: "event"
    if the panel says them itself.
    """
    view: View = {"workers": worker_rows(world, ())}
    view["files"] = {key: row for _, key, row in rows_of(world, "log_files")}
    view["lines"] = {key: row for _, key, row in rows_of(world, "log_lines")}
    return view


def logs_text(view: View, most: int | None = LAST_LINES) -> tuple[str, list[str]]:
    """Return the first line of the text and the others: the last `most`, or all."""
    if not view["files"]:
        return f"{count_noun(len(view['workers']), 'member')}, no output of workers here", []
    blocks = sorted(view["lines"].values(), key=lambda row: float(row["order"]))
    levels = Counter("".join(row["levels"] for row in blocks if row["kind"] != "event"))
    stopped = sum(view["workers"].get(key, {}).get("state") == "left" for key in view["files"])
    stopped *= stopped < len(view["files"])  # in a cluster that has ended, all of them
    parts = [count_noun(len(view["files"]) - stopped, "worker"), *([f"{stopped} stopped"] if stopped else [])]
    parts += [count_noun(sum(levels.values()), "line") + " outside cells"]
    nouns = {WARNING: "warning", ERROR: "error"}
    parts += [count_noun(levels[level], noun) for level, noun in nouns.items() if levels[level]]
    gone = [f"  {row['name']}: {row['missing']}" for row in view["files"].values() if row["missing"]]
    said = [line for row in blocks for line in _say_block(view, row)]
    room = len(said) if most is None else max(0, most - len(gone))
    more = f"; the last {room}:" if len(said) > room else ""
    return ", ".join(parts) + more, [*gone, *said[len(said) - min(room, len(said)) :]]


def _say_block(view: View, row: Row) -> list[str]:
    if row["kind"] == "event":
        return [f"  {line}" for line in row["lines"]]
    name = view["files"].get(str(row["worker"]), {}).get("name", row["worker"])
    return [f"  {name}: {shorten_words(line, _WIDEST)}" for line in row["lines"]]
