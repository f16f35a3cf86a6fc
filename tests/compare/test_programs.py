"""The corpus: each right twin is right, and the first difference of each wrong one is named, with place and cause."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import pytest
from program import Program

import rpcbench

pytestmark = pytest.mark.process

PROGRAMS: list[Program] = [
    program
    for path in sorted(Path(__file__).parent.glob("corpus_*.py"))
    for program in importlib.import_module(path.stem).PROGRAMS
]


def compare(cluster: rpcbench.Cluster, program: Program, parallel: object) -> rpcbench.CompareReport:
    workers = cluster.workers[: math.prod(program.mesh.values())]
    return cluster.compare(
        reference=program.reference, parallel=parallel, mesh=program.mesh, steps=program.steps, workers=workers
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_right_program_is_right_and_a_wrong_one_is_explained(four: rpcbench.Cluster, program: Program) -> None:
    compare(four, program, program.parallel).raise_if_wrong()
    report = compare(four, program, program.wrong)
    assert not report.ok
    assert report.first.phase == program.phase, report.first
    assert report.first.name in program.places, report.first
    assert re.search(program.cause, report.first.cause, re.IGNORECASE), report.first
    assert not report.first.cause.startswith("none of"), "an explanation, not a list of what was tried"
    assert (report.first.ranks and report.first.error > report.first.allowed) or "mask" in report.first.cause
