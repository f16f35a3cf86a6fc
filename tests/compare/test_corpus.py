"""Each program of the corpus is well formed: its name is its own, and its phase is one that a comparison knows."""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from program import PHASES, Program

FILES = sorted(path.stem for path in Path(__file__).parent.glob("corpus_*.py"))
PROGRAMS: list[Program] = [each for file in FILES for each in importlib.import_module(file).PROGRAMS]


def test_no_two_programs_share_a_name() -> None:
    assert len(PROGRAMS) >= 34
    assert [name for name, count in Counter(each.name for each in PROGRAMS).items() if count > 1] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=[each.name for each in PROGRAMS])
def test_a_program_is_well_formed(program: Program) -> None:
    assert program.name.isidentifier() and program.steps >= 1
    assert program.phase in PHASES[1:] and program.places
    assert re.compile(program.cause, re.IGNORECASE).search("") is None, "matches any explanation"
    assert 2 <= math.prod(program.mesh.values()) <= 4
    assert program.wrong != program.parallel
    for function in (*program.reference, *program.parallel, *program.wrong):
        assert getattr(importlib.import_module(function.__module__), function.__name__) is function


@pytest.mark.parametrize("program", PROGRAMS, ids=[each.name for each in PROGRAMS])
def test_places_and_size_of_a_program(program: Program) -> None:
    model = program.reference[0]()
    known = {name for name, _ in [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]}
    assert set(program.places) - known <= {"loss"}
    assert sum(each.numel() for each in model.parameters()) <= 100_000
