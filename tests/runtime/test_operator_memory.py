"""The bytes that operators allocate: nested, on other threads, freed, and beside a profiler of the program."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

from rpcbench.runtime.operator_memory import AllocationMeter, leave_block, measures_allocations, sum_allocations


@dataclass
class Event:
    """An event of torch's legacy profiler, as far as it is read."""

    what: str
    number: int = 0
    of: str = ""
    cpu: int = 0
    cuda: int = 0

    def kind(self) -> str:
        return self.what

    def handle(self) -> int:
        return self.number

    def name(self) -> str:
        return self.of

    def cpu_memory_usage(self) -> int:
        return self.cpu

    def cuda_memory_usage(self) -> int:
        return self.cuda


def test_bytes_count_for_the_operator_and_for_those_that_called_it():
    outer, inner, end = Event("push", 1, "ones"), Event("push", 2, "empty"), Event("pop", 2)
    took = [Event("memory_alloc", cpu=100), Event("memory_alloc", cpu=-40), Event("memory_alloc", cuda=7)]
    events = [Event("mark"), Event("memory_alloc", cpu=5), outer, inner, *took, end, Event("memory_alloc", cpu=1)]
    assert sum_allocations([[*events, Event("pop", 1), Event("pop", 9)]]) == {"ones": 108, "empty": 107}


def test_an_operator_within_itself_counts_once():
    events = [Event("push", 1, "add"), Event("push", 2, "add"), Event("memory_alloc", cpu=8)]
    assert sum_allocations([events, [Event("memory_alloc", cpu=8)]]) == {"add": 8}


def test_threads_add_up_and_what_is_outside_a_block_is_not_counted():
    meter = AllocationMeter()

    def work() -> None:
        with meter.measured_block():
            torch.eye(10)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.eye(10)
    assert meter.collect_sums()["aten::eye"] == 2 * 400


def test_a_block_within_a_block_counts_once_and_can_end_early():
    meter = AllocationMeter()
    with meter.measured_block():
        assert measures_allocations()
        with meter.measured_block():
            torch.eye(10)
        leave_block()
        assert not measures_allocations() and meter.collect_sums()["aten::eye"] == 400
        torch.eye(10)
    assert meter.collect_sums()["aten::eye"] == 400


def test_a_profiler_of_the_program_is_left_alone():
    meter = AllocationMeter()
    with torch.autograd.profiler_legacy.profile(profile_memory=True) as theirs, meter.measured_block():
        torch.eye(10)
        assert not measures_allocations()
    assert "aten::eye" in {event.name for event in theirs.function_events} and meter.collect_sums() == {}


def test_an_error_ends_the_block():
    meter = AllocationMeter()
    with pytest.raises(ZeroDivisionError), meter.measured_block():
        _ = torch.eye(10), 1 / 0
    assert not measures_allocations() and meter.collect_sums()["aten::eye"] == 400
