"""`python -m benchmarks --panels`: the cost of open panels.

Two figures: CPU time while panels follow, through a real kernel, and frames a second of a browser that draws them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks import panel_frames
from benchmarks.kernel_driver import kernel
from benchmarks.panel_pace import CHANGES, UPDATES


class Plan(NamedTuple):
    """`turns` with a panel and as many without, of so many `seconds`; `updates` that a browser draws."""

    turns: int = 12
    seconds: float = 2.0
    updates: int = 200


QUICK = Plan(turns=1, seconds=0.5, updates=20)
_PATIENCE = 600.0


class Bound(NamedTuple):
    """What was measured and what it is held against: at most that share of a core, or at least so many frames a second.

    `without`: the share that the same changes take while no panel is open.
    """

    title: str
    bound: float
    measured: float
    without: float | None = None

    @property
    def ok(self) -> bool:
        return self.measured <= self.bound if self.without is not None else self.measured >= self.bound

    def row(self) -> tuple[str, str, str, str]:
        if self.without is None:
            return self.title, f"at least {self.bound:g}/s", f"{self.measured:.0f}/s", ""
        return self.title, f"at most {self.bound:.1%}", f"{self.measured:.1%}", f"{self.without:.1%}"


def measure(plan: Plan) -> Iterator[Bound]:
    """All bounds, each as soon as it is known. BenchError where a cell fails."""
    with tempfile.TemporaryDirectory(prefix="rb-") as runtime, kernel({"XDG_RUNTIME_DIR": runtime}) as notebook:
        notebook.run("%load_ext rpcbench\n%cluster start 2\nimport json\nfrom benchmarks import panel_pace")
        for name in CHANGES:
            code = f"print(json.dumps(panel_pace.cost({name!r}, {plan.turns}, {plan.seconds})))"
            added, taken = json.loads(notebook.run(code, patience=_PATIENCE).text)
            yield Bound(f"{name}: {UPDATES} updates a second, of a core", 0.03, added, taken)
        notebook.run("%cluster stop")
    if not panel_frames.obstacle():
        for name in panel_frames.SHOWN:
            shown = panel_frames.frames(name, plan.updates, UPDATES)
            yield Bound(f"{name}: {panel_frames.ROWS} rows in a browser, frames", 10, shown)


def as_table(bounds: Iterable[Bound]) -> Table:
    caption = "CPU time of kernel and two workers, panel open minus closed, medians; a busy machine makes it more."
    table = Table(title=f"panels; {os.cpu_count()} cores under a load of {os.getloadavg()[0]:.1f}", caption=caption)
    for heading in ("", "bound", "measured", "without a panel"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("")
    for bound in bounds:
        table.add_row(*bound.row(), "✓" if bound.ok else "✗")
    return table


def as_values(bounds: Iterable[Bound]) -> dict[str, Any]:
    return {"bounds": [{**bound._asdict(), "ok": bound.ok} for bound in bounds]}
