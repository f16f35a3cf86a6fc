"""The Llamas of `benchmarks.simulated_llamas`, in a small shape: checkpointing, the fused norm, stages, the table."""

from functools import partial

import pytest
import torch

from benchmarks import llama_program, simulated_llamas
from benchmarks.llama_program import RMSNorm, Settings, Shape, make_pipeline_step, make_step, split_layers
from rpcbench.launch.simulate_programs import play_rank
from rpcbench.simulation.rank_log import FORWARD, RECOMPUTE, Collective, Kernel
from rpcbench.simulation.simulated_world import Role, SimulatedWorld

SMALL = Shape(width=256, layers=4, heads=4, kv_heads=2, hidden=512, vocabulary=512)


@pytest.fixture(autouse=True)
def small_shape(monkeypatch):
    monkeypatch.setitem(llama_program.SHAPES, "small", SMALL)


def play(checkpointing: str, fused: bool = False):
    return play_rank(partial(make_step, Settings("small", 2, 128, checkpointing, fused)), {"dp": 4}, 0)


def products(log, phase: str) -> int:
    return sum(isinstance(each, Kernel) and each.op == "mm" and each.part.phase == phase for each in log.actions)


def test_checkpointing_keeps_less_and_computes_more():
    logs = {mode: play(mode) for mode in ("none", "layer", "op", "full")}
    kept = [logs[mode].peak_memory().by_category["activations"] for mode in logs]
    assert kept[0] > kept[1] > kept[3]
    assert kept[0] > kept[2] > kept[3]
    forward = 7 * SMALL.layers + 1
    assert {mode: products(log, FORWARD) for mode, log in logs.items()} == dict.fromkeys(logs, forward)
    again = {mode: products(log, RECOMPUTE) for mode, log in logs.items()}
    assert again == {"none": 0, "layer": 2 * 6, "op": 3 * 4, "full": 6 * 4}  # the last of seven is not needed again


def test_a_fused_norm_is_the_norm_and_keeps_less():
    norms = [RMSNorm(16, is_fused) for is_fused in (True, False)]
    inputs = [torch.arange(96.0).sin().view(2, 3, 16).requires_grad_() for _ in norms]
    results = [norm(x) for norm, x in zip(norms, inputs, strict=True)]
    for result in results:
        (result * torch.arange(96.0).cos().view(2, 3, 16)).sum().backward()
    torch.testing.assert_close(*results)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(norms[0].weight.grad, norms[1].weight.grad)
    peaks = [play("none", fused).peak_memory().by_category["activations"] for fused in (True, False)]
    assert peaks[0] < peaks[1]


def test_stages_of_a_pipeline_gather_for_products_and_send_to_each_other():
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    program = partial(make_pipeline_step, Settings("small", 4, 128, "full"))
    for rank, peer in ((0, 4), (7, 3)):
        log = play_rank(program, mesh, rank)
        moves = [each for each in log.actions if isinstance(each, Collective) and each.peer is not None]
        assert {(each.kind, each.peer, each.bytes) for each in moves} == {
            (kind, peer, 2 * 64 * SMALL.width * 2) for kind in ("send", "recv")
        }  # two rows of half a sequence in bfloat16
        assert {each.group for each in log.actions if isinstance(each, Collective)} == {"pp", "dp", "tp"}


def test_layers_are_split_evenly():
    parts = split_layers(126, 8)
    assert [len(each) for each in parts] == [16, 16, 15, 16, 16, 15, 16, 16]
    assert [layer for each in parts for layer in each] == list(range(126))


def test_the_table_has_a_line_for_each_row_and_for_each_factor():
    row = simulated_llamas.Row(Settings("small", 2, 128, "op"), 4, "H100", 100.0, 1.0)
    world = SimulatedWorld(
        {"dp": 4}, simulated_llamas.describe_h100(), [Role("all", 0, 4)], [play("op")], tokens=4 * 2 * 128
    )  # fmt: skip
    head, _, line = simulated_llamas.as_markdown([row], [world]).splitlines()
    assert line.count("|") == head.count("|") == 11
    assert f"| {world.tokens_per_second:,.0f} | 100.0 |" in line
    assert {factor.tested.ranks for factor in simulated_llamas.FACTORS} == {128}
