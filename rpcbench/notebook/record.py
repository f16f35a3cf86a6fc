"""`%record lesson.json` and `%record stop`: a record of what the cluster does, for `rpcbench.replay`."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from rpcbench.launch.tracebacks import short
from rpcbench.notebook.help import helps
from rpcbench.telemetry.recording import Recording, record

_USAGE = "say where to: %record lesson.json; %record stop ends it"
_EVERYTHING = "--everything"


@magics_class
class RecordMagics(Magics):
    """One recording at a time."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._recording: Recording | None = None

    @line_magic
    @helps
    def record(self, line: str) -> None:
        """Record what all members do, for lessons that play without workers.

        %record lesson.json                 begin; with --everything also what else is in tables: logs, paths
        %record mark after the race         give this moment a name
        %record stop                        end it and write the file; rpcbench.replay("lesson.json") plays it
        """
        words = shlex.split(line)
        with short():
            sys.stdout.write(f"{self._do(words)}\n")

    def _do(self, words: list[str]) -> str:
        match words:
            case [] if self._recording is not None:
                return f"To {self._recording.path}: {self._recording.record()}."
            case ["stop"]:
                return self._stop()
            case ["mark", _, *_]:
                self._running().mark(" ".join(words[1:]))
                return "Marked."
            case [path] | [path, "--everything"] | ["--everything", path] if not path.startswith("-"):
                return self._begin(path, _EVERYTHING in words)
        raise UsageError(_USAGE)

    def _begin(self, path: str, everything: bool) -> str:
        if self._recording is not None:
            raise UsageError(f"a recording to {self._recording.path} goes on; %record stop ends it")
        self._recording = record(path, everything)
        return f"Recording to {path} until %record stop."

    def _running(self) -> Recording:
        if self._recording is None:
            raise UsageError(f"nothing is recorded; {_USAGE}")
        return self._recording

    def _stop(self) -> str:
        recording = self._running()
        self._recording = None
        made = recording.stop()
        return f'{recording.path}: {made}. rpcbench.replay("{recording.path}") plays it.'

    def end(self) -> None:
        """Write what is recorded, if anything is."""
        if self._recording is not None:
            self._stop()
