"""`rpcbench.simulate`: roles, figures of the world, the report."""

import pytest
import torch
from torch import nn

import rpcbench
from rpcbench.launch.simulate_programs import find_roles


def program(mesh):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    group = mesh.get_group("dp")

    def step():
        model(torch.randn(1024, 256)).sum().backward()
        for each in model.parameters():
            torch.distributed.all_reduce(each.grad, group=group)
        model.zero_grad()

    return step


def test_a_world_has_figures_and_a_report():
    world = rpcbench.simulate(program, mesh={"dp": 16}, hardware="h100", tokens=16 * 1024)
    assert world.ranks == 16
    assert [(row.op, row.group, row.bytes) for row in world.collectives] == [
        ("all_reduce(SUM)", "world", size) for size in (256 * 256 * 4, 1024) * 2
    ]
    assert world.flops == 16 * (2 + 3) * 2 * 1024 * 256 * 256  # the first input needs no gradient
    assert sum(world.causes.values()) == pytest.approx(world.step_seconds)
    assert world.tokens_per_second == pytest.approx(1024 / world.step_seconds)
    assert 0 < world.mfu < 1
    assert world.is_fitting
    text = str(world)
    assert "dp 16: 16 ranks of h100" in text
    assert "it fits" in text
    slower = world.on(rpcbench.hardware("l40s"))
    assert slower.step_seconds > world.step_seconds


def test_ranks_that_count_as_equal_and_are_not_are_told():
    def uneven(mesh):
        step = program(mesh)
        return lambda: (step(), mesh.get_rank() == 3 and torch.distributed.barrier())

    world = rpcbench.simulate(uneven, mesh={"dp": 4})
    assert len(world.remarks) == 1
    assert "ranks 0 and 3 count as equal, and are not" in world.remarks[0]


def test_stages_are_roles():
    assert [(role.name, role.rank, role.ranks) for role in find_roles({"pp": 2, "dp": 2, "tp": 2}, None)] == [
        ("pp=0", 0, 4), ("pp=1", 4, 4),
    ]  # fmt: skip
    assert [(role.rank, role.ranks) for role in find_roles({"dp": 2, "pp": 2}, None)] == [(0, 2), (1, 2)]
    assert [role.rank for role in find_roles({"dp": 4}, [1, 3])] == [1, 3]
    with pytest.raises(ValueError, match="4 is not one of the 4 ranks"):
        find_roles({"dp": 4}, [4])
    with pytest.raises(ValueError, match="sizes of at least 1"):
        rpcbench.simulate(program, mesh={"dp": 0})
