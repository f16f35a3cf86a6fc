"""What a simulated rank has in place of data: counts of experts, copies of tensors."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rpcbench import SimulationError
from rpcbench.launch.simulate_programs import play_rank
from rpcbench.simulation.rank_log import RankLog

EXPERTS, TOKENS = 8, 20


def play(step, size: int = 4, rank: int = 1) -> RankLog:
    return play_rank(lambda: step, {"ep": size}, rank)


def counts_of(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(EXPERTS, (tokens,)).bincount(minlength=EXPERTS)


def test_counts_are_even_and_the_report_says_so():
    seen = []
    log = play(lambda: seen.append((counts_of().tolist(), torch.randn(16).histc(4).tolist())))
    assert seen[-1] == ([3, 3, 3, 3, 2, 2, 2, 2], [4.0] * 4)
    assert sorted(remark.partition(": ")[2] for remark in log.assumed) == [
        f"counts are assumed to be even, as many of each of {bins}" for bins in (4, 8)
    ]
    assert f"test_fake_operators.py:{counts_of.__code__.co_firstlineno + 1}: " in "".join(log.assumed)


def test_counts_that_are_sent_are_those_of_equal_ranks():
    seen = []

    def step():
        counts = counts_of()
        there, all_counts = torch.empty_like(counts), counts.new_empty(4 * EXPERTS)
        dist.all_to_all_single(there, counts)
        dist.all_gather_single(all_counts, counts)
        sent = there.view(4, 2).sum(1).tolist()
        rows = torch.arange(EXPERTS).repeat_interleave(there)
        seen.append((there.tolist(), all_counts.tolist(), sent, rows.shape))

    play(step)
    even = [3, 3, 3, 3, 2, 2, 2, 2]
    assert seen[-1] == ([3, 3] * 4, even * 4, [6] * 4, (24,))


@pytest.mark.parametrize("send", ["uneven", "sum"])
def test_values_that_do_not_follow_are_not_known(send):
    def step():
        counts = counts_of()
        if send == "sum":
            dist.all_reduce(counts)
            counts.tolist()
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts, [5, 1, 1, 1], [2, 2, 2, 2])
        came.tolist()

    with pytest.raises(SimulationError, match=r"reads the value of a tensor.*simulated_value"):
        play(step)


def test_counts_whose_number_is_not_known_are_an_error():
    with pytest.raises(SimulationError, match="depends on the values of a tensor"):
        play(lambda: torch.randint(EXPERTS, (TOKENS,)).bincount())


def test_a_copy_of_a_model_is_a_model():
    def program(mesh):
        model = copy.deepcopy(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        assert all(isinstance(each, nn.Parameter) and each.is_leaf for each in model.parameters())

        def step():
            model(torch.ones(2, 64)).sum().backward()
            assert copy.deepcopy(model)[0].weight.grad.shape == (64, 64)
            model.zero_grad()

        return step

    log = play_rank(program, {"dp": 4}, 0)
    linear = 64 * 64 * 4 + 64 * 4
    assert log.before["parameters"] == sum(log.before.values()) == 2 * linear
    assert 8 * linear <= log.peak_memory().bytes < 9 * linear  # model, gradients, and the copies of both


def test_a_transfer_from_any_rank_is_an_error():
    with pytest.raises(SimulationError, match="receives from any rank, and a simulated rank cannot tell which"):
        play(lambda: dist.recv(torch.ones(2)))
