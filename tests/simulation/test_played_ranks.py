"""One rank played without data: what it records of operators, streams, collectives and memory."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from rpcbench import SimulationError, simulated_value
from rpcbench.launch.simulate_programs import play_rank
from rpcbench.simulation.rank_log import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, Collective, Kernel, RankLog

WIDTH, ROWS = 64, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make_step(model, read=lambda loss: None):
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        read(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def blocks(count=2):
    return nn.Sequential(*[Block() for _ in range(count)])


def collectives(log: RankLog) -> list[tuple[str, str, int, str]]:
    return [(each.op, each.group, each.bytes, each.site) for each in log.actions if isinstance(each, Collective)]


def flops(log: RankLog, phase: str) -> int:
    return sum(each.flops for each in log.actions if isinstance(each, Kernel) and each.part.phase == phase)


def fsdp(mesh):
    model = blocks()
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return make_step(model)


def test_fsdp_gathers_and_reduces_each_block_on_streams_of_its_own():
    log = play_rank(fsdp, {"dp": 4}, 0)
    size = sum(each.numel() for each in Block().parameters()) * 4
    order = [("all_gather", "world", size // 4, f"FSDP {n}") for n in (0, 1, 1, 0)]
    reduced = [("reduce_scatter", "world", size, f"FSDP {n}") for n in (1, 0)]
    seen = [(op.partition("(")[0], *rest) for op, *rest in collectives(log)]
    assert [row for row in seen if row[0] == "all_gather"] == order
    assert [row for row in seen if row[0] == "reduce_scatter"] == reduced
    assert {each.stream for each in log.actions if isinstance(each, Collective)}.isdisjoint({0})


def test_tensor_parallel_adds_up_in_forward_and_backward():
    def program(mesh):
        model = blocks()
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return make_step(model)

    log = play_rank(program, {"dp": 512, "tp": 2}, 1023)
    size = ROWS * WIDTH * 4
    assert [each[:3] for each in collectives(log)] == [("all_reduce(SUM)", "tp", size)] * 3  # none for the first input
    assert all(each.ranks == (1022, 1023) for each in log.actions if isinstance(each, Collective))
    forward = 2 * 2 * 2 * ROWS * WIDTH * 4 * WIDTH // 2  # two blocks of two products, cut in two
    assert flops(log, FORWARD) == forward
    assert flops(log, BACKWARD) == 2 * forward - forward // 4  # the first input needs no gradient


def test_ranks_of_one_process_do_not_share_the_meshes_of_dtensor():
    def program(mesh):
        model = blocks()
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        return make_step(model)

    for rank in (0, 5):
        log = play_rank(program, {"dp": 2, "tp": 4}, rank)
        assert all(rank in each.ranks for each in log.actions if isinstance(each, Collective))


def test_ddp_reduces_the_buckets_that_it_forms_after_its_first_step():
    def program(mesh):
        return make_step(nn.parallel.DistributedDataParallel(blocks(3), bucket_cap_mb=0.1))

    log = play_rank(program, {"dp": 4}, 0)
    rows = collectives(log)
    assert {row[0] for row in rows} == {"all_reduce(SUM)"}
    assert sum(row[2] for row in rows) == sum(each.numel() for each in blocks(3).parameters()) * 4
    assert len(rows) > 1


def test_memory_is_counted_to_the_byte():
    log = play_rank(lambda: make_step(blocks(1)), {"dp": 1}, 0)
    parameters = sum(each.numel() for each in blocks(1).parameters()) * 4
    count = len(list(blocks(1).parameters()))
    peak = log.peak_memory()
    assert log.before["parameters"] == peak.by_category["parameters"] == parameters
    assert log.before["optimizer"] == 2 * parameters + 4 * count  # two moments, and the number of steps
    assert log.parameters == parameters // 4
    assert peak.part.phase == OPTIMIZER or peak.by_category["activations"] > 0
    total = {name: sum(change.bytes for change in log.memory if change.category == name) for name in log.before}
    assert total["parameters"] == total["optimizer"] == total["gradients"] == 0  # all that a step takes is given back


def test_a_model_that_the_program_drops_is_freed():
    size = 4 * (WIDTH * WIDTH + WIDTH)

    def step():
        nn.Linear(WIDTH, WIDTH)(torch.ones(ROWS, WIDTH)).sum().backward()

    log = play_rank(lambda: step, {"dp": 1}, 0)
    assert log.before["parameters"] == 0  # that of the first step is gone
    assert log.peak_memory().by_category["parameters"] == size
    assert sum(change.bytes for change in log.memory) == 0
    assert log.parameters == 0


def test_a_forward_that_is_run_again_is_told_from_the_first():
    class Recomputed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    log = play_rank(lambda: make_step(nn.Sequential(Block(), Recomputed())), {"dp": 1}, 0)
    assert flops(log, FORWARD) == 4 * flops(log, RECOMPUTE) > 0  # the last of the four is not needed again


def test_an_operator_belongs_to_its_module_in_both_directions():
    log = play_rank(lambda: make_step(blocks()), {"dp": 1}, 0)
    products = [each.part for each in log.actions if isinstance(each, Kernel) and each.flops]
    forward = [part.module for part in products if part.phase == FORWARD]
    backward = [part.module for part in products if part.phase == BACKWARD]
    assert forward == ["0.up", "0.down", "1.up", "1.down"]
    assert list(dict.fromkeys(backward)) == forward[::-1]


def test_a_value_that_is_read_is_an_error_with_its_line():
    with pytest.raises(SimulationError, match=rf"{__file__}, line \d+ reads the value of a tensor.*simulated_value"):
        play_rank(lambda: make_step(blocks(), lambda loss: loss.item()), {"dp": 2}, 0)
    seen = []
    play_rank(lambda: make_step(blocks(), lambda loss: seen.append(simulated_value(loss, 2.5))), {"dp": 2}, 0)
    assert seen == [2.5, 2.5]
    assert simulated_value(torch.tensor(1.5), 2.5) == 1.5


def test_a_shape_that_depends_on_values_is_an_error():
    with pytest.raises(SimulationError, match="depends on the values of a tensor"):
        play_rank(lambda: make_step(blocks(), lambda loss: loss.reshape(1).nonzero()), {"dp": 2}, 0)


def test_nothing_is_left_in_the_process():
    stream = torch.cpu.Stream
    play_rank(fsdp, {"dp": 4}, 0)
    assert torch.cpu.Stream is stream
    assert not torch.distributed.is_initialized()
    assert torch.ones(2).sum().item() == 2
    assert blocks()(torch.ones(1, WIDTH)).isfinite().all()
