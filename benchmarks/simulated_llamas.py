"""`python -m benchmarks.simulated_llamas [--markdown FILE | --large]`: Llamas by `rpcbench.simulate` beside
torchtitan's tables; with `--large`, the time and memory that it takes here to play two large worlds.

Sources of the published figures: torchtitan's docs/performance.md of April 2024 (64 A100) and its
benchmarks/llama3_h100_202412_torchtitan.md (H100). A play takes about a minute of one core.

Three rows are fitted, all others are tests:
- the share of the peak that matrix products reach, one number for each of the two hardwares, by one row each;
- what torch.compile and float8 change, which is not simulated: a factor on tokens and one on memory, each the ratio of
  two published rows of 8 GPUs, and tested on 128 GPUs.
Memory is fitted nowhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import rpcbench
from benchmarks.command import between_marks
from benchmarks.llama_program import Settings, make_pipeline_step, make_step, play
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.simulated_world import SimulatedWorld

_GIB = 2**30
_MARKS = "llamas"
H100_SHARE = 0.554
"""Of the bfloat16 peak of an H100 of 700 W, for one of 500 W: fitted to the row "Llama 3 8B, 8 H100"."""


def describe_h100() -> Hardware:
    """Return the H100 of torchtitan's tables: 96 GB of HBM2e, 500 W."""
    h100 = rpcbench.hardware("h100")
    share = H100_SHARE / h100.efficiency.matmul[-1][1]
    slower = dataclasses.replace(
        h100.efficiency,
        matmul=tuple((size, rate * share) for size, rate in h100.efficiency.matmul),
        attention=tuple((size, rate * share) for size, rate in h100.efficiency.attention),
    )
    described: Hardware = dataclasses.replace(
        h100, name="H100 (96 GB, 500 W)", memory_bandwidth=2.4e12, memory_bytes=94.0 * _GIB, efficiency=slower,
        source="torchtitan's benchmarks of December 2024; shares as those of h100, times one fitted number",
    )  # fmt: skip
    return described


class Row(NamedTuple):
    """A line of a published table."""

    settings: Settings
    ranks: int
    hardware: str  # "H100" or "A100"
    tokens: float  # per second and GPU
    memory: float | None = None  # GiB
    use: str = "tested"


class Factor(NamedTuple):
    """What a technique that is not simulated changes, from published rows of 8 GPUs; and the row that tests it."""

    technique: str
    tokens: float
    memory: float
    tested: Row


_H8 = Settings("Llama 3 8B", 2, 8192, "op")
ROWS = [
    Row(_H8, 8, "H100", 5762, 82.4, "fitted (time)"),
    Row(_H8, 128, "H100", 5605, 67.0),
    Row(Settings("Llama 3 8B", 1, 8192, "layer", True, True), 64, "A100", 2904),
    Row(Settings("Llama 3 8B", 1, 8192, "op", True, True), 64, "A100", 2973),
    Row(Settings("Llama 3 70B", 1, 8192, "full", False, True), 64, "A100", 331),
    Row(Settings("Llama 2 13B", 2, 4096, "none", True, True), 64, "A100", 2162, use="fitted (time)"),
    Row(Settings("Llama 2 13B", 2, 4096, "layer", True, True), 64, "A100", 1914),
    Row(Settings("Llama 2 13B", 2, 4096, "op", True, True), 64, "A100", 1904),
    Row(Settings("Llama 2 70B", 1, 4096, "op", False, True), 64, "A100", 355),
    Row(Settings("Llama 2 70B", 2, 4096, "full", False, True), 64, "A100", 353),
]
FACTORS = [
    Factor("torch.compile", 6667 / 5762, 77.0 / 82.4, Row(_H8, 128, "H100", 6514, 62.0)),
    Factor("torch.compile and float8", 8532 / 5762, 76.8 / 82.4, Row(_H8, 128, "H100", 8380, 61.8)),
]


def play_rows(rows: Sequence[Row] = ROWS) -> Iterator[SimulatedWorld]:
    """Play the rows, one after another."""
    for row in rows:
        hardware = describe_h100() if row.hardware == "H100" else rpcbench.hardware("a100")
        print(f"playing {row.settings.model} on {row.ranks} {row.hardware}", file=sys.stderr)
        yield play(row.settings, row.ranks, hardware)


def as_markdown(rows: Sequence[Row], worlds: Sequence[SimulatedWorld]) -> str:
    """Return the table."""
    lines = [
        "| model, batch x length | recomputed | GPUs | | tokens/s, GPU | published | error | GiB | published | error |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row, world in zip(rows, worlds, strict=True):
        lines.append(_as_line(row, world, row.settings.checkpointing, row.use, 1.0, 1.0))
        for factor in FACTORS:
            if factor.tested[:3] == row[:3]:
                lines.append(
                    _as_line(factor.tested, world, f"op; {factor.technique}", "factor", factor.tokens, factor.memory)
                )
    return "\n".join(lines) + "\n"


def _as_line(row: Row, world: SimulatedWorld, kind: str, use: str, of_tokens: float, of_memory: float) -> str:
    assert world.tokens_per_second is not None
    settings = row.settings
    tokens, memory = world.tokens_per_second * of_tokens, world.reserved_bytes / _GIB * of_memory
    published = ("", "") if row.memory is None else (f"{row.memory}", f"{memory / row.memory - 1:+.1%}")
    cells = [
        f"{settings.model}, {settings.batch} x {settings.length}", kind, f"{row.ranks} {row.hardware}", use,
        f"{tokens:,.0f}", f"{row.tokens:,}", f"{tokens / row.tokens - 1:+.1%}", f"{memory:.1f}", *published,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def play_large_worlds() -> Iterator[str]:
    """Play one model on 1,024 ranks and a larger one as a pipeline; yield a line on each: its cost here, and itself."""
    many = partial(make_step, _H8)
    stages = partial(make_pipeline_step, Settings("Llama 3 405B", 32, 8192, "full"))
    for program, mesh, groups in ((many, {"dp": 1024}, 1024), (stages, {"pp": 8, "dp": 8, "tp": 8}, 8)):
        tokens = groups * program.args[0].batch * program.args[0].length
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            world = rpcbench.simulate(partial(note_memory, Path(folder), program), mesh, describe_h100(), tokens=tokens)
            seconds = time.perf_counter() - began
            most = max(float(file.read_text()) for file in Path(folder).iterdir())
        yield f"{seconds:.0f} s, {most / 1e9:.1f} GB in the largest process\n{world}\n"


def note_memory(folder: Path, program: Callable[[Any], Callable[[], None]], mesh: Any) -> Callable[[], None]:
    """Return the program's step, which also writes the most memory of its process to a file."""
    step = program(mesh)

    def step_and_note() -> None:
        step()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        (folder / str(os.getpid())).write_text(str(most))

    return step_and_note


def main() -> None:
    """Play all rows and print the table; or put it into a file, too."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_llamas", description=__doc__)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also put the table into this file")
    parser.add_argument("--large", action="store_true", help="play two large worlds instead")
    options = parser.parse_args()
    if options.large:
        for line in play_large_worlds():
            print(line, flush=True)
        return
    table = as_markdown(ROWS, list(play_rows()))
    print(table)
    if options.markdown is not None:
        options.markdown.write_text(between_marks(options.markdown, _MARKS, table))


if __name__ == "__main__":
    main()
