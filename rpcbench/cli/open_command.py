"""`rpcbench open FILES`: shows traces of torch's profiler, dumps of its flight recorder, or a record, in JupyterLab.

Guarantees
- The files are only read. The notebook is a new one in the current folder, signed, with the pictures already in it,
  and opens without a question for its kernel.
- With `--text` the summary is printed, and nothing is written or started.
- Files that are damaged, or of no such kind, are an `RpcError` that names them, before anything is written.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from IPython.core.formatters import DisplayFormatter

from rpcbench.base.errors import RpcError
from rpcbench.cli.lessons import kernel_metadata
from rpcbench.telemetry.job_files import DUMPS, RECORD, TRACES, identify_files, open_job
from rpcbench.telemetry.message_views import messages_view
from rpcbench.telemetry.recording import Player, Record
from rpcbench.telemetry.summary import summarize_view

_LINES = {
    TRACES: ("p = rpcbench.profile.open({})\np", "p.collectives", "rpcbench.replay({})"),
    DUMPS: ("timeline = rpcbench.collectives.open({})\ntimeline", "rpcbench.replay({})"),
    RECORD: ("rpcbench.replay({})",),
}
"""The cells of a notebook, by the kind of its files."""


def open_files(options: argparse.Namespace) -> None:
    """Show the files that the arguments name."""
    files = [str(Path(file).absolute()) for file in options.files]
    try:
        kind, found = identify_files(files), open_job(files)
    except (ValueError, OSError) as error:
        raise RpcError(str(error)) from None
    if options.text:
        print(_describe(found))
        return
    path = _write_notebook(_make_cells(kind, files, found))
    print(f"Made {path}.")
    sys.stdout.flush()  # exec discards Python's buffers
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", str(path)])


def _describe(found: Any) -> str:
    if not isinstance(found, Record):
        return str(found)
    player = Player(found)
    player.go_to_frame(len(found.frames) - 1)
    return f"{found}\n{summarize_view(messages_view(player.world()))}"


def _make_cells(kind: str, files: list[str], found: Any) -> list[tuple[str, Any]]:
    """Return the text of each cell, and its output; None for one that appears when it runs."""
    given = repr(files[0] if len(files) == 1 else files)
    shown = {TRACES: (found, getattr(found, "collectives", None)), DUMPS: (found,), RECORD: ()}[kind]
    texts = [line.format(given) for line in _LINES[kind]]
    first = ("%load_ext rpcbench\nimport rpcbench", None)
    return [first, *((text, shown[n] if n < len(shown) else None) for n, text in enumerate(texts))]


def _write_notebook(cells: list[tuple[str, Any]]) -> Path:
    formats: Any = importlib.import_module("nbformat")  # it has no types
    signatures: Any = importlib.import_module("nbformat.sign")
    notebook = formats.v4.new_notebook(
        cells=[_make_cell(formats.v4, *cell) for cell in cells], metadata=kernel_metadata()
    )
    path = next(path for n in count(1) if not (path := Path(f"opened{'' if n == 1 else f'-{n}'}.ipynb")).exists())
    formats.write(notebook, path)
    signatures.NotebookNotary().sign(notebook)
    return path


def _make_cell(format_: Any, text: str, shown: Any) -> Any:
    if shown is None:
        return format_.new_code_cell(text)
    formatter: Any = DisplayFormatter
    data, metadata = formatter().format(shown)
    return format_.new_code_cell(text, outputs=[format_.new_output("display_data", data=data, metadata=metadata)])
