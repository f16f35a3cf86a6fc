"""`rpcbench bench`: runs the comparison, prints the table, writes the JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from rpcbench.bench import soak
from rpcbench.bench.compare import Plan, compare, titles
from rpcbench.bench.report import as_table, as_values
from rpcbench.words.errors import RpcError

OURS = "rpcbench"
_WIDE = 150
MODULES = {OURS: "rpcbench.rpc", "torch": "torch.distributed.rpc"}


def run(
    *, against: str, seed: int, quick: bool, rounds: int | None, only: Sequence[str], json_file: Path | None
) -> None:
    """Compare with `against`, a key of MODULES. `rounds` None takes the plan's own number, no `only` all rows."""
    plan = Plan.quick(seed) if quick else Plan(seed)
    if rounds is not None:
        plan = replace(plan, rounds=rounds)
    figures = compare({name: MODULES[name] for name in (OURS, against)}, plan, chosen(plan, only))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(as_table(figures, OURS, against, plan))
    if json_file:
        json_file.write_text(json.dumps(as_values(figures, OURS, against, plan), indent=2) + "\n")


def chosen(plan: Plan, only: Sequence[str]) -> list[str]:
    """The rows whose title has one of these texts in it."""
    known = titles(plan)
    for text in only:
        if not any(text in title for title in known):
            raise RpcError(f"no row has {text!r} in its title; there are\n  " + "\n  ".join(known))
    return [title for title in known if not only or any(text in title for text in only)]


def run_soak(*, quick: bool) -> None:
    """Print memory after each round of the soak. RpcError where a process has grown, or a table is not empty."""
    readings = soak.soak(soak.Plan(calls=2000, rrefs=300, rounds=4) if quick else soak.Plan())
    Console().print(soak.as_table(readings))
    grown = {name: more for name, more in soak.growth(readings).items() if more > soak.SLACK}
    if grown:
        raise RpcError(", ".join(f"{name} has grown by {more / 2**20:.1f} MB" for name, more in grown.items()))
