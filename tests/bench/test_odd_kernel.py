"""Notebooks with the kernel of another library, and its differences from ipykernel."""

from __future__ import annotations

import re
import time
from pathlib import Path

import odd_kernel
import pytest

from benchmarks import peers
from benchmarks.kernel_driver import kernel
from benchmarks.pairs import BenchError
from benchmarks.peer_notebook import OURS, Extension, Plan

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.usefixtures("no_leaks")]
FOUND = {"PYTHONPATH": str(Path(__file__).parent)}
EXTENSION = Extension(odd_kernel.__name__, FOUND, odd_kernel.OUTPUTS)
PEER = OURS._replace(start="", workers=("0", "1"), cell="%%rank WORKER\nBODY", extension=EXTENSION)


def test_lost_first_cells_output_by_a_comm_and_errors_in_replies_are_recognized() -> None:
    seen = peers._group(PEER, Plan(calls=1, lines=3), peers.CALLS, peers._calls)
    told = [re.sub(r"^[\d.]+ m?s\b", "TIME", text) for _, text in seen]
    assert told == ["TIME (cells lost: 1)", "TIME", "TIME; 3 of 3", "no, OddError; fails"]


def test_a_worker_that_never_makes_a_tensor_raises_an_error() -> None:
    with pytest.raises(BenchError, match="no tensor was made on 0"):
        peers._group(PEER, Plan(losses=0), peers.CALLS, peers._calls)


def test_a_kernel_of_an_extension_is_interrupted_by_a_message() -> None:
    with kernel(FOUND, EXTENSION.module) as made:
        cell = made.send("sleep")
        made.interrupt()
        assert made.end(cell, time.monotonic()).error == "Stopped"
