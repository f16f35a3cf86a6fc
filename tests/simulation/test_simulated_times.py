"""Times of actions: streams, waits, meetings of ranks, causes."""

import dataclasses

import pytest

from rpcbench import SimulationError, hardware
from rpcbench.simulation.costs import collective_seconds, kernel_time, link_of_group
from rpcbench.simulation.hardware import Efficiency, Hardware, LinkSpeed, load_hardware, read_curve
from rpcbench.simulation.rank_log import (
    COMPUTE,
    FORWARD,
    Action,
    BeginOperation,
    Collective,
    EndOperation,
    Kernel,
    ModelPart,
    RankLog,
    RecordEvent,
    WaitForCollective,
    WaitForEvent,
)
from rpcbench.simulation.step_timing import BUBBLE, CONTENTION, OTHERS, slowest_of, time_logs

PART = ModelPart("", FORWARD)
FLAT = ((1.0, 1.0),)
UNIT = Hardware(  # one operation, and one byte, in a second
    "unit", {"float32": 1.0}, 1.0, 1.0, 0.0, LinkSpeed(1.0, 0.0), LinkSpeed(0.5, 0.0), 2,
    Efficiency(FLAT, FLAT, FLAT, FLAT),
)  # fmt: skip


def work(seconds: int, stream: int = COMPUTE) -> Kernel:
    return Kernel(stream, "mm", "matmul", "float32", seconds, 0, PART)


def reduce(number: int, size: int, stream: int = COMPUTE, blocking: bool = False, ranks: tuple[int, ...] = (0, 1)):
    return Collective(
        stream, number, "all_reduce(SUM)", "all_reduce", "dp", ranks, None, size, "", "", blocking, PART
    )  # fmt: skip


def transfer(kind: str, number: int, peer: int, size: int) -> Collective:
    return Collective(COMPUTE, number, kind, kind, "pp", (0, 1), peer, size, "", "", False, PART)


def replay(*ranks: list[Action]):
    return time_logs([RankLog(rank, actions) for rank, actions in enumerate(ranks)], UNIT)


def test_a_collective_runs_beside_compute_until_it_is_waited_for():
    timeline = replay([work(2), reduce(1, 4), work(3), WaitForCollective(COMPUTE, 1), work(1)])[0]
    assert timeline.seconds == 2 + 4 + 1
    assert timeline.causes == {"compute": 6.0, "exposed dp": 1.0}


def test_an_operator_loses_time_to_the_collectives_beside_it():
    share = dataclasses.replace(UNIT, efficiency=dataclasses.replace(UNIT.efficiency, contention=0.5))
    actions = [work(2), reduce(1, 4), work(3), WaitForCollective(COMPUTE, 1), work(4)]
    timeline = time_logs([RankLog(0, actions), RankLog(1, actions)], share)[1]
    assert timeline.causes == {"compute": 9.0, CONTENTION: 1.5}
    assert timeline.seconds == 2 + 4.5 + 4


def test_more_ranks_wait_longer_for_the_slowest_one():
    uneven = dataclasses.replace(UNIT, efficiency=dataclasses.replace(UNIT.efficiency, spread=0.02))
    assert slowest_of(1) == 0
    assert slowest_of(8) == pytest.approx(1.424, abs=0.02)  # a known expectation of eight normal numbers
    assert time_logs([RankLog(0, [work(100)])], uneven, ranks=8)[0].causes == {
        "compute": 100.0, OTHERS: pytest.approx(2 * slowest_of(8)),
    }  # fmt: skip


def test_a_blocking_one_holds_up_its_stream():
    timeline = replay([work(2), reduce(1, 4, blocking=True), work(3)])[0]
    assert timeline.causes == {"compute": 5.0, "exposed dp": 4.0}


def test_collectives_of_a_group_follow_each_other():
    timeline = replay([reduce(1, 4), reduce(2, 4), WaitForCollective(COMPUTE, 2)])[0]
    assert timeline.collectives == {1: (0.0, 0.0, 4.0), 2: (0.0, 4.0, 8.0)}


def test_an_operation_of_a_stage_lasts_from_its_first_operator_to_its_last_one():
    forward = [BeginOperation(0, 2, "F", 0), work(3), reduce(1, 4, blocking=True), work(1), EndOperation()]
    timeline = replay([work(2), *forward, work(5)])[0]
    assert timeline.operations == [(2.0, 10.0)]


def test_a_stream_waits_for_the_event_of_another_one_and_not_for_what_comes_behind_it():
    timeline = replay([work(5, 1), RecordEvent(1, 7), work(9, 1), WaitForEvent(COMPUTE, 7), work(1)])[0]
    assert [(span.lane, span.begin, span.end) for span in timeline.spans] == [
        ("stream 1", 0.0, 5.0), ("stream 1", 5.0, 14.0), ("compute", 5.0, 6.0),
    ]  # fmt: skip


def test_a_collective_begins_when_its_last_rank_has_come():
    one, other = replay([work(1), reduce(1, 4, blocking=True)], [work(6), reduce(1, 4, blocking=True)]).values()
    assert one.seconds == other.seconds == 10
    assert one.causes == {"compute": 1.0, OTHERS: 5.0, "exposed dp": 4.0}
    assert other.causes == {"compute": 6.0, "exposed dp": 4.0}


def test_a_wait_for_another_stage_is_a_bubble_and_the_transfer_is_not():
    first = [work(3), transfer("send", 1, 1, 2)]
    second = [transfer("recv", 1, 0, 2), WaitForCollective(COMPUTE, 1), work(3)]
    timeline = replay(first, second)[1]
    assert timeline.causes == {BUBBLE: 3.0, "exposed pipeline": 2.0, "compute": 3.0}


def test_waits_without_an_operator_between_them_have_their_own_causes():
    first = [work(3), transfer("send", 1, 1, 2)]
    apart = reduce(2, 2, blocking=True, ranks=(1, 5))  # the other one is not played
    second = [transfer("recv", 1, 0, 2), WaitForCollective(COMPUTE, 1), apart, work(3)]
    timeline = replay(first, second)[1]
    assert timeline.causes == {BUBBLE: 3.0, "exposed pipeline": 2.0, "exposed dp": 4.0, "compute": 3.0}


def test_ranks_that_wait_for_each_other_are_an_error():
    with pytest.raises(SimulationError, match=r"rank 0 in recv of pp .* for \[1\]; rank 1 in recv of pp"):
        replay(
            [transfer("recv", 1, 1, 2), WaitForCollective(COMPUTE, 1), transfer("send", 2, 1, 2)],
            [transfer("recv", 1, 0, 2), WaitForCollective(COMPUTE, 1), transfer("send", 2, 0, 2)],
        )


def test_a_launch_that_takes_longer_than_its_operator_is_seen():
    slow = dataclasses.replace(UNIT, launch_seconds=3.0)
    timeline = time_logs([RankLog(0, [work(1), work(1)])], slow)[0]
    assert timeline.causes == {"compute": 2.0, "launch": 5.0}
    assert time_logs([RankLog(0, [work(1)])], dataclasses.replace(slow, has_streams=False))[0].seconds == 4


def test_collectives_cost_what_their_algorithms_do():
    four = (0, 1, 2, 3)
    assert collective_seconds(reduce(1, 8, ranks=(0, 1)), 0, UNIT) == 8  # 2 (n - 1) / n of the bytes
    assert link_of_group((0, 1), UNIT) == UNIT.within
    assert link_of_group((0, 2), UNIT) == UNIT.between  # on two hosts, one rank of each
    assert link_of_group(four, UNIT).bandwidth == 1.0  # two ranks of each: two links
    assert collective_seconds(reduce(1, 8, ranks=four), 0, UNIT) == 12
    assert collective_seconds(transfer("send", 1, 2, 8), 0, UNIT) == 16
    assert collective_seconds(reduce(1, 8, ranks=(0,)), 0, UNIT) == 0


def test_an_operator_takes_the_longer_side_of_the_roofline():
    assert kernel_time(Kernel(0, "mm", "matmul", "float32", 5, 3, PART), UNIT) == (5.0, "compute")
    assert kernel_time(Kernel(0, "mm", "matmul", "float32", 3, 5, PART), UNIT) == (5.0, "memory-bound")
    with pytest.raises(KeyError, match="no peak for float8: it has float32"):
        kernel_time(Kernel(0, "mm", "matmul", "float8", 3, 5, PART), UNIT)


def test_hardware_is_found_by_name_and_survives_a_file(tmp_path):
    assert hardware("h100").name == "h100"
    with pytest.raises(ValueError, match="did you mean h100"):
        hardware("h1000")
    hardware("a100").save(tmp_path / "a100.json")
    assert load_hardware(tmp_path / "a100.json") == hardware("a100")
    assert read_curve(((1.0, 0.0), (100.0, 1.0)), 10.0) == pytest.approx(0.5)
    assert read_curve(((1.0, 0.25), (100.0, 1.0)), 0.1) == 0.25
