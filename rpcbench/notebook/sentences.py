"""What `%cluster` and the sidebar say of workers: the same words in both."""

from __future__ import annotations

from rpcbench.base.errors import counted
from rpcbench.launch.history import Rerun
from rpcbench.launch.workforce import Workforce

NONE_RUNS = "No cluster runs. %cluster start 2 starts two workers."


def restarted(names: list[str]) -> str:
    return f"Started again: {', '.join(names)}. What {'it' if len(names) == 1 else 'they'} held is lost."


def interrupted(names: list[str]) -> str:
    return f"Interrupted: {', '.join(names)}."


def sentence(found: Workforce) -> str:
    names = found.workers
    return f"{counted(len(names), 'worker')}: {', '.join(names)}."


def sentence_of_replay(name: str, cells: list[Rerun]) -> str:
    """How a worker has done with what it ran again: one line, and one for each cell that failed."""
    failed = [cell for cell in cells if cell.error is not None]
    if not cells:
        return f"{name} had run no cell."
    if not failed:
        return f"{name} has run its {counted(len(cells), 'cell')} again."
    lines = [f"  {_first_line(cell.code)}  ->  {type(cell.error).__name__}: {cell.error}" for cell in failed]
    return "\n".join([f"{name} has run its {counted(len(cells), 'cell')} again; {len(failed)} failed:", *lines])


def _first_line(code: str) -> str:
    first, *rest = code.strip().splitlines() or [""]
    return f"{first[:60]} …" if rest or len(first) > 60 else first
