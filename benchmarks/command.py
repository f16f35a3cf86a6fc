"""`python -m benchmarks`: runs the comparison, prints the table, writes the JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks import (
    counts,
    fence,
    notebook_waits,
    panel_frames,
    panels,
    peer_notebook,
    peers,
    pipelines,
    rows,
    scaling,
    soak,
)
from benchmarks.compare import Plan, compare
from benchmarks.pairs import BenchError
from benchmarks.peer_notebook import PEERS
from benchmarks.report import as_columns, as_markdown, as_plot, as_table, as_values
from rpcbench.base.errors import RpcError

OURS = "rpcbench"
_WIDE = 150
_BENCH, _PEERS, _COLUMNS, _COUNTS = "bench", "peers", "interpreters", "counts"
OUR_MODULE = "rpcbench.rpc"


@dataclass(frozen=True, slots=True)
class Files:
    """Where to write figures, plot and table; the table goes between the marks that the Markdown file has for it."""

    json: Path | None = None
    svg: Path | None = None
    markdown: Path | None = None


def run(*, against: str, seed: int, quick: bool, rounds: int | None, only: Sequence[str], files: Files) -> None:
    """Compare with `against`, one of `sides.OTHERS`. `rounds` None takes the plan's number, no `only` all rows."""
    plan = Plan.quick(seed) if quick else Plan(seed)
    if rounds is not None:
        plan = replace(plan, rounds=rounds)
    if files.markdown:
        between_marks(files.markdown, _BENCH, "")
    figures = compare({OURS: OUR_MODULE, against: rows.module_of(against)}, plan, chosen(plan, only))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(as_table(figures, OURS, against, plan))
    if files.json:
        files.json.write_text(json.dumps(as_values(figures, OURS, against, plan), indent=2) + "\n")
    if files.svg:
        files.svg.write_text(as_plot(figures, OURS, against, plan))
    if files.markdown:
        files.markdown.write_text(between_marks(files.markdown, _BENCH, as_markdown(figures, OURS, against, plan)))


def between_marks(file: Path, name: str, table: str) -> str:
    """The text of the file with this table. RpcError where it has no place for it."""
    begin_mark, end_mark = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, begin, rest = file.read_text().partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not (begin and end):
        raise RpcError(f"{file} has no place for the table: put the lines {begin_mark} and {end_mark} there")
    return f"{before}{begin}\n{table}{end}{after}"


def chosen(plan: Plan, only: Sequence[str]) -> list[str]:
    """The rows whose title has one of these texts in it."""
    known = list(plan.rows())
    for text in only:
        if not any(text in title for title in known):
            raise RpcError(f"no row has {text!r} in its title; there are\n  " + "\n  ".join(known))
    return [title for title in known if not only or any(text in title for text in only)]


def run_columns(runs: Sequence[Path], *, files: Files) -> None:
    """Print the figures of runs under several interpreters side by side. RpcError where there is no place for them."""
    table = as_columns([json.loads(run.read_text()) for run in runs])
    print(table, end="")
    if files.markdown:
        files.markdown.write_text(between_marks(files.markdown, _COLUMNS, table))


def run_scaling(*, quick: bool, files: Files) -> None:
    """Print, and plot into one file for each series, how cost grows."""
    found = []
    for series in scaling.all_series(quick):
        found.append(scaling.run(series))
        if files.svg:
            name = f"{files.svg.stem}-{series.name.replace(' ', '-')}{files.svg.suffix}"
            files.svg.with_name(name).write_text(scaling.as_plot(found[-1]))
    curves = [curve for each in found for curve in each]
    Console(width=None if sys.stdout.isatty() else _WIDE).print(scaling.as_table(curves))
    if files.json:
        files.json.write_text(json.dumps(scaling.as_values(curves), indent=2) + "\n")


def run_counts(*, against: str, quick: bool, only: Sequence[str], seed: int, files: Files) -> None:
    """Print the cost of each deed in counts, beside `against`."""
    if files.markdown:
        between_marks(files.markdown, _COUNTS, "")
    plan = counts.QUICK if quick else counts.Plan()
    found = counts.measure({OURS: OUR_MODULE, against: rows.module_of(against)}, plan, seed, only)
    table = counts.as_markdown(found, OURS, against, plan)
    print(table, end="")
    if files.json:
        files.json.write_text(json.dumps(counts.as_values(found), indent=2) + "\n")
    if files.markdown:
        files.markdown.write_text(between_marks(files.markdown, _COUNTS, table))


def run_notebook(*, quick: bool, seed: int, kind: str, files: Files) -> None:
    """Print what a user of the notebook waits for, beside the bounds."""
    bounds = list(notebook_waits.measure(notebook_waits.QUICK if quick else notebook_waits.Plan(), seed, kind))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(notebook_waits.as_table(bounds))
    if files.json:
        files.json.write_text(json.dumps(notebook_waits.as_values(bounds, seed), indent=2) + "\n")


def run_panels(*, quick: bool, files: Files) -> None:
    """Print what panels cost the runtime, and how often a browser draws them."""
    if problem := panel_frames.obstacle():
        print(f"Not measured in a browser: {problem}.")
    bounds = list(panels.measure(panels.QUICK if quick else panels.Plan()))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(panels.as_table(bounds))
    if files.json:
        files.json.write_text(json.dumps(panels.as_values(bounds), indent=2) + "\n")


def run_pipelines(*, quick: bool, seed: int, files: Files) -> None:
    """Print our pipelines beside torch's, what the runtime costs, and how idle workers are beside the simulator."""
    plan = pipelines.QUICK if quick else pipelines.Plan()
    found = list(pipelines.measure(plan, seed))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(pipelines.as_table(found, plan, seed))
    if files.json:
        files.json.write_text(json.dumps(pipelines.as_values(found, seed), indent=2) + "\n")


def run_peers(names: Sequence[str], *, quick: bool, files: Files) -> None:
    """Print what was seen in notebooks of ours and of other libraries: these, or all that are installed."""
    if files.markdown:
        between_marks(files.markdown, _PEERS, "")
    measured = peers.chosen(names)
    for peer in PEERS.values() if not names else ():
        if not peer.is_installed:
            print(peers.missing(peer))
    found = {}
    for peer in measured:
        try:
            found[peer.name] = fence.measure(peer, peer_notebook.QUICK if quick else peer_notebook.Plan())
        except BenchError as error:
            if peer.name == OURS:
                raise
            print(f"{peer.name} could not be measured: {error}")
    Console(width=None if sys.stdout.isatty() else _WIDE).print(peers.as_table(found))
    if files.json:
        files.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    if files.markdown:
        files.markdown.write_text(between_marks(files.markdown, _PEERS, peers.as_markdown(found)))


def run_soak(*, quick: bool) -> None:
    """Print memory after each round of the soak. RpcError where a process has grown, or a table is not empty."""
    plan = soak.Plan(calls=2000, rrefs=300, rounds=4) if quick else soak.Plan()
    readings = soak.soak(plan)
    Console().print(soak.as_table(readings, plan))
    grown = {name: more for name, more in soak.growth(readings).items() if more > soak.SLACK}
    if grown:
        told = ", ".join(f"{name} by {more / 2**20:.1f} MB" for name, more in grown.items())
        raise RpcError(f"in the last third of the calls still grew: {told}")
