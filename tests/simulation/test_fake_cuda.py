"""Programs for GPUs and NCCL, played on a machine without."""


import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import rpcbench
from rpcbench import SimulationError, rpc
from rpcbench.launch.simulate_programs import play_rank
from rpcbench.pipeline import Pipeline, split
from rpcbench.simulation.rank_log import Collective, Kernel, RankLog, RecordEvent, Synchronize, WaitForEvent

WIDTH, ROWS = 64, 32


def play(step, size: int = 4, rank: int = 1) -> RankLog:
    return play_rank(lambda: step, {"dp": size}, rank)


def collectives(log: RankLog) -> list[Collective]:
    return [each for each in log.actions if isinstance(each, Collective)]


def test_the_device_of_a_program_for_gpus_is_that_of_the_cpu():
    def program(mesh):
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_name() == "h100"
        assert torch.cuda.get_device_properties(1).total_memory == int(rpcbench.hardware("h100").memory_bytes)
        torch.cuda.set_device(1)
        device = torch.device("cuda", torch.cuda.current_device())
        model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH).to(device).to(1), [1])
        own = init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))

        def step():
            rows = torch.randn(ROWS, WIDTH).pin_memory().cuda(non_blocking=True) + torch.ones((), device=1).to(1)
            model(rows).sum().backward()
            dist.all_reduce(torch.ones(2, device=device), group=own.get_group())

        return step

    log = play_rank(program, {"dp": 4}, 1)
    assert sorted(each.bytes for each in collectives(log)) == [8, (WIDTH + 1) * WIDTH * 4]
    assert not torch.cuda.is_available()  # the program alone was told so


def test_a_module_changes_its_type_and_leaves_meta():
    def program(mesh):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False))
        model[1].weight = model[0].weight
        model = model.to_empty(device="cuda").bfloat16()
        return lambda: model(torch.ones(ROWS, dtype=torch.int64)).sum().backward()

    log = play_rank(program, {"dp": 1}, 0)
    assert log.before["parameters"] == 16 * WIDTH * 2


@pytest.mark.parametrize(("device", "type_of_norm"), [("cuda", "float32"), ("cpu", "bfloat16")])
def test_autocast_computes_in_float32_what_it_does_on_that_device(device, type_of_norm):
    seen = []
    model = nn.Linear(WIDTH, WIDTH)

    def step():
        with torch.autocast(device, torch.bfloat16):
            output = model(torch.ones(ROWS, WIDTH))
            seen.append((output.dtype, functional.layer_norm(output, [WIDTH]).dtype))

    play(step)
    assert seen[-1] == (torch.bfloat16, getattr(torch, type_of_norm))
    assert not torch.is_autocast_enabled("cuda")


def test_streams_and_events_of_cuda_are_recorded():
    def step():
        side, done = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=False)
        with torch.cuda.stream(side):
            x = torch.ones(4)
            done.record()
        torch.cuda.current_stream().wait_event(done)
        x.record_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()

    actions = play(step).actions
    fill, record, wait, last = actions
    assert isinstance(fill, Kernel)
    assert isinstance(record, RecordEvent)
    assert fill.stream == record.stream != 0
    assert wait == WaitForEvent(0, record.event)
    assert last == Synchronize()


def test_transfers_in_a_batch_and_coalesced_collectives_are_those_of_nccl():
    def step():
        rank = dist.get_rank()
        x, y = torch.ones(4), torch.ones(4)
        sends = [dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.irecv, y, (rank - 1) % 4)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        with dist._coalescing_manager(async_ops=True) as together:
            dist.all_reduce(x)
            dist.all_reduce(y)
        together.wait()
        with dist._coalescing_manager(async_ops=True) as together:
            dist.all_gather_single(torch.ones(16), x)
            dist.all_gather_single(torch.ones(16), y)
        together.wait()

    rows = [(each.kind, each.peer, each.bytes) for each in collectives(play(step))]
    assert rows == [("send", 2, 16), ("recv", 0, 16), ("all_reduce", None, 32), ("all_gather", None, 32)]


def test_groups_are_made_whatever_their_backend_is():
    def step():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        for group in (dist.new_group([0, 1], backend="nccl", pg_options=options), dist.new_group(backend="gloo")):
            dist.all_reduce(torch.ones(2), group=group)
        dist.monitored_barrier()

    assert [(each.kind, each.ranks) for each in collectives(play(step))][-3:] == [
        ("all_reduce", (0, 1)), ("all_reduce", (0, 1, 2, 3)), ("barrier", (0, 1, 2, 3)),
    ]  # fmt: skip


def test_objects_of_other_ranks_are_those_of_this_one():
    seen = []

    def step():
        each = [None] * 4
        dist.all_gather_object(each, {"rows": 3})
        shared = ["run 7"]
        dist.broadcast_object_list(shared, src=0)
        seen.append((each, shared))

    play(step)
    assert seen[-1] == ([{"rows": 3}] * 4, ["run 7"])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: dist.broadcast_object_list([None], src=0), "gets an object from a rank that is not there"),
        (lambda: torch.cuda.get_rng_state(), r"calls torch\.cuda\.get_rng_state, which needs a GPU"),
        (lambda: rpc.rpc_sync("worker2", print), "speaks to workers, as RPC and pipelines of rpcbench do"),
        (lambda: Pipeline(split([nn.Linear(4, 4)], ["worker1"])), "speaks to workers.*torch.distributed.pipelining"),
        (lambda: torch.cuda.mem_get_info(), r"calls torch\.cuda\.cudart, which needs a GPU"),
        (lambda: torch.cuda.nccl.all_reduce([]), r"calls torch\.cuda\.nccl\.all_reduce.*collectives of torch\.dist"),
        (lambda: torch.multiprocessing.spawn(print, nprocs=4), "starts processes for its ranks.*read RANK, LOCAL_RANK"),
    ],
)
def test_a_call_that_needs_others_or_a_gpu_is_an_error_with_its_line(call, text):
    with pytest.raises(SimulationError, match=rf"test_fake_cuda.py:\d+ {text}"):
        play(call)


def test_the_memory_of_the_gpu_is_that_of_the_played_rank():
    seen = []

    def step():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x = torch.ones(2**20)
        y = x + 1
        del x
        seen.append((torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before))
        assert torch.cuda.max_memory_reserved() >= 2 * 2**22
        del y

    play(step)
    assert seen[-1] == (2**22, 2 * 2**22)


@pytest.mark.skipif(hasattr(torch._C, "_cuda_memorySnapshot"), reason="this torch has CUDA")
def test_a_call_that_this_torch_does_not_have_is_an_error_with_its_line():
    with pytest.raises(SimulationError, match=r"test_fake_cuda.py, line \d+ calls memory_snapshot, which needs CUDA"):
        play(lambda: torch.cuda.memory_snapshot())
    with pytest.raises(AttributeError, match="absent"):
        play(lambda: torch._C.absent)


def test_a_read_of_a_computed_value_waits_for_the_gpu():
    from rpcbench.simulation.fake_operators import FakeOperators
    from rpcbench.simulation.fake_world import RankPlace, fake_world
    from rpcbench.simulation.rank_recorder import RankRecorder

    recorder, operators = RankRecorder(0), FakeOperators(2.5)
    with fake_world(RankPlace(0, 4, rpcbench.hardware("h100")), recorder.mark_gradients), operators, recorder:
        x = torch.randn(4)
        read = x.sum().item(), x.argmax().item(), bool(x.isnan().any()), torch.tensor(7).item()
    assert read == (2.5, 2, False, 7)
    assert recorder.log.actions.count(Synchronize()) == 3  # the program itself has made the last one
    assert len(operators.remarks) == 2
