"""The pieces of a model's parameters as one rank reads them: rank 1 of 4 in a process group that moves nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from rpcbench.distributed import shard_events
from rpcbench.distributed.parameter_shards import MeshLayout, ParameterPiece, read_model
from rpcbench.distributed.shard_events import ShardEvents, WatchedModel, watch_model, watch_variable
from rpcbench.runtime.events import EventLog

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module", "ignore:.*FullyShardedDataParallel")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    c10d.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    c10d.destroy_process_group()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2), nn.LayerNorm(2))


def two_dimensions(mesh: DeviceMesh) -> nn.Sequential:
    """FSDP times tensor parallel."""
    model = net()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def pieces(model: nn.Module) -> dict[str, ParameterPiece]:
    return {found.piece.name: found.piece for found in read_model(model).parameters}


def test_two_dimensions_of_sharding(mesh: DeviceMesh) -> None:
    reading = read_model(two_dimensions(mesh))
    found = {one.piece.name: one.piece for one in reading.parameters}
    assert {name: (one.placements, one.region, one.gathered) for name, one in found.items()} == {
        "0.weight": (("Shard(0)", "Shard(0)"), ((8, 0), (4, 8)), ((8, 0), (8, 8))),
        "0.bias": (("Shard(0)", "Shard(0)"), ((8,), (4,)), ((8,), (8,))),
        "2.weight": (("Shard(0)", "Shard(1)"), ((0, 8), (1, 8)), ((0, 8), (2, 8))),
        "2.bias": (("Shard(0)", "Replicate"), ((0,), (1,)), ((0,), (2,))),
        "3.weight": (("Shard(0)",), ((0,), (1,)), ((0,), (2,))),
        "3.bias": (("Shard(0)",), ((0,), (1,)), ((0,), (2,))),
    }
    assert {one.kind for one in found.values()} == {"sharded"}
    assert (found["0.weight"].held_bytes, found["0.weight"].whole_bytes) == (128, 512)
    assert found["0.weight"].mesh == MeshLayout(("dp", "tp"), (2, 2), (0, 1, 2, 3))
    assert found["3.weight"].mesh == MeshLayout(("dp",), (2,), (1, 3))
    assert reading.meshes == [MeshLayout(("dp", "tp"), (2, 2), (0, 1, 2, 3))], "the root of all, once"
    assert (reading.kind, reading.remarks) == ("Sequential", [])
    assert [reading.group_of[n] for n in range(6)] == [1, 1, 2, 2, 0, 0]


def test_a_gathered_parameter_is_read_as_the_piece(mesh: DeviceMesh) -> None:
    model = two_dimensions(mesh)
    before = pieces(model)
    model[0].unshard()
    assert tuple(model[0].weight.to_local().shape) == (8, 8), "it is gathered"
    assert pieces(model) == before


def test_pieces_that_are_empty_or_uneven(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    found = pieces(model)
    assert found["0.weight"].region == ((2, 0), (2, 3)) and found["1.weight"].held_bytes == 0
    assert found["0.weight"].mesh == MeshLayout(("dim 0",), (4,), (0, 1, 2, 3)), "its dimension has no name"


def test_placements_of_distributed_tensors(mesh: DeviceMesh) -> None:
    model = nn.Module()
    for name, placements in {
        "copy": [Replicate(), Replicate()], "rows": [Replicate(), Shard(0)], "both": [Shard(0), Shard(1)],
    }.items():  # fmt: skip
        model.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements)))
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial(), Replicate()])
    model.register_parameter("sum", nn.Parameter(partial))
    found = pieces(model)
    assert {name: one.kind for name, one in found.items()} == {
        "copy": "replicated", "rows": "sharded", "both": "sharded", "sum": "partial",
    }  # fmt: skip
    assert found["both"].region == ((0, 2), (2, 2)) and found["rows"].region == ((2, 0), (2, 4))
    assert found["sum"].placements == ("Partial", "Replicate") and found["sum"].gathered is None


def test_a_model_that_is_not_sharded() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False), nn.Linear(2, 2, device="meta"))
    model[1].weight = model[0].weight
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0), requires_grad=False))
    reading = read_model(model)
    found = {one.piece.name: one.piece for one in reading.parameters}
    assert list(found) == ["scale", "0.weight", "2.weight", "2.bias"]
    assert {one.kind for one in found.values()} == {"plain"}
    assert (found["scale"].shape, found["scale"].held_bytes, found["scale"].trainable) == ((), 4, False)
    assert found["0.weight"].also == ("1.weight",) and found["0.weight"].held_bytes == 84
    assert (found["2.weight"].device, found["2.weight"].held_bytes) == ("meta", 0)
    assert reading.meshes == [] and reading.remarks == [
        "Parameters on the meta device have a shape and no memory yet.",
        "0.weight is also 1.weight: one parameter under several names.",
    ]
    assert read_model(nn.ReLU()).remarks == ["ReLU has no parameters."]


def test_wrappers_are_not_in_names(mesh: DeviceMesh) -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    reading = read_model(DistributedDataParallel(inner))
    assert [one.piece.name for one in reading.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {one.piece.kind for one in reading.parameters} == {"replicated"} and reading.kind == "Sequential"
    assert reading.parameters[0].piece.mesh == MeshLayout(("DDP",), (4,), (0, 1, 2, 3)) and reading.meshes == []
    compiled = nn.Module()  # as torch.compile makes one
    compiled._orig_mod = nn.Linear(2, 2)
    assert list(pieces(compiled)) == ["weight", "bias"] and read_model(compiled).kind == "Linear"


def test_flat_parameters_of_fsdp1_are_told(mesh: DeviceMesh) -> None:
    reading = read_model(FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu")))
    assert {one.piece.kind for one in reading.parameters} == {"flat"}
    assert reading.remarks == [
        "FSDP1 keeps parts of one flat parameter; fully_shard (FSDP2) keeps a piece of each parameter."
    ]


# -- watching
class Heard(EventLog):
    """A log with an observer, and the rows that it has been told of since they were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.listening = True

    def take(self) -> set[tuple[str, str]]:
        return {(table, key) for table, rows in self.drain_changes(10_000).rows.items() for key in rows}


def figures(watched: WatchedModel, column: str) -> dict[str, int]:
    return {row.fixed["name"]: row.shard_row()[column] for row in watched.rows}


def test_a_training_step_is_followed(mesh: DeviceMesh) -> None:
    model = two_dimensions(mesh)
    seen = Heard()
    watched = WatchedModel(model, "model", None, seen)
    whole: list[list[bool]] = []
    model[2].register_forward_hook(lambda *_: whole.append([one for one, _ in watched.model_row()["groups"]]))
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.ones(4, 8)).sum()
    assert whole == [[True, False, False]], "the root's own parameters stay whole, a layer's are freed after it"
    loss.backward()
    watched.read_gradients()
    pieces_of_this_rank = {"0.weight": 128, "0.bias": 16, "2.weight": 32, "2.bias": 4, "3.weight": 4, "3.bias": 4}
    assert figures(watched, "gradient") == figures(watched, "bytes") == pieces_of_this_rank
    row = watched.model_row()
    assert (row["groups"], row["gathered"]) == ([[False, 1], [False, 2], [False, 2]], 0)
    assert row["most"] == 4 * (2 + 2) + 4 * (8 * 8 + 8), "the root's own, and the first layer's part for this rank"
    assert seen.take() == {("models", "model"), *(("shards", f"model/{name}") for name in pieces_of_this_rank)}
    optimizer.step()
    watched.optimizer_stepped(optimizer)
    state = {name: 2 * size + 4 for name, size in pieces_of_this_rank.items()}  # two moments and the number of the step
    assert figures(watched, "state") == state and watched.model_row()["steps"] == 1
    optimizer.zero_grad()
    watched.before_optimizer_step(optimizer)
    assert set(figures(watched, "gradient").values()) == {0}
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    watched.optimizer_stepped(other)
    assert watched.model_row()["steps"] == 1, "the step of another model's optimizer"


def test_gradients_are_read_before_a_forward_pass_while_someone_looks() -> None:
    model = nn.Linear(4, 2)
    seen = Heard()
    watched = WatchedModel(model, "model", None, seen)
    model(torch.ones(1, 4)).sum().backward()
    model(torch.ones(1, 4))
    assert figures(watched, "gradient") == {"weight": 32, "bias": 8}
    assert watched.model_row()["groups"] == [] and watched.model_row()["most"] == 0
    seen.listening = False
    model.zero_grad()
    model(torch.ones(1, 4))
    assert figures(watched, "gradient") == {"weight": 32, "bias": 8}, "nobody looks, so nothing is read"


@pytest.mark.parametrize("backward", [False, True])
def test_a_gradient_is_not_read_once_several_threads_run_the_model(backward: bool) -> None:
    model = nn.Linear(4, 2)
    watched = WatchedModel(model, "model", None, Heard())
    model(torch.ones(1, 4)).sum().backward()
    watched.read_gradients()
    loss = model(torch.ones(1, 4)).sum()
    other = threading.Thread(target=loss.backward if backward else lambda: model(torch.ones(1, 4)))
    other.start()
    other.join()
    model.zero_grad()
    model(torch.ones(1, 4))
    watched.read_gradients()
    assert figures(watched, "gradient") == {"weight": 32, "bias": 8}, "the last ones that were read"


def test_a_backward_pass_of_a_sharded_model_on_another_thread_is_noticed(mesh: DeviceMesh) -> None:
    model = two_dimensions(mesh)
    watched = WatchedModel(model, "model", None, Heard())
    loss = model(torch.ones(4, 8)).sum()
    other = threading.Thread(target=loss.backward)
    other.start()
    other.join()
    watched.read_gradients()
    assert set(figures(watched, "gradient").values()) == {0}


def hooks(model: nn.Module) -> int:
    """How many hooks the model, its parameters and its groups have."""
    groups = read_model(model).groups
    own = sum(name in vars(group) for group in groups for name in ("_to_unsharded", "_to_sharded"))
    parameters = sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters())
    return own + parameters + sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("sharded", [True, False])
def test_the_end_of_a_watch_leaves_no_hook(mesh: DeviceMesh, sharded: bool) -> None:
    model = two_dimensions(mesh) if sharded else net()
    before = hooks(model)
    watched = WatchedModel(model, "model", None, Heard())
    assert hooks(model) > before
    watched.remove_hooks()
    assert hooks(model) == before


class OneAgent:
    """An agent of which a watch needs only the bus."""

    def __init__(self) -> None:
        self.links = SimpleNamespace(bus=EventLog())
        self.events = ShardEvents(self)  # type: ignore[arg-type]

    def part(self, kind: type[ShardEvents]) -> ShardEvents:
        return self.events


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> OneAgent:
    one = OneAgent()
    monkeypatch.setattr(shard_events.current, "current_agent", lambda: one)
    return one


def test_a_watched_model_may_be_freed(mesh: DeviceMesh, agent: OneAgent) -> None:
    model = two_dimensions(mesh)
    watch_model(model)
    assert list(agent.events.models_table()) == ["model"] and len(agent.events.shards_table()) == 6
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert agent.events.models_table() == agent.events.shards_table() == {}


def test_a_later_watch_replaces_the_earlier_one(mesh: DeviceMesh, agent: OneAgent) -> None:
    model = two_dimensions(mesh)
    before = hooks(model)
    watch_model(model, "first")
    once = hooks(model)
    watch_model(model, "first")
    watch_model(model[0], "layer")
    assert list(agent.events.models_table()) == ["layer"], "two watches of one parameter would count it twice"
    watch_model(model, "second")
    assert list(agent.events.models_table()) == ["second"] and hooks(model) == once
    other = nn.Linear(2, 2)
    watch_model(other, "second")
    assert hooks(model) == before and agent.events.models_table()["second"]["kind"] == "Linear"


def test_optimizer_steps_are_seen_while_a_model_is_watched(agent: OneAgent) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks as after
    from torch.optim.optimizer import _global_optimizer_pre_hooks as ahead

    before = len(ahead), len(after)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch_model(model, stage=3)
    assert (len(ahead), len(after)) == (before[0] + 1, before[1] + 1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert agent.events.models_table()["model 3"]["steps"] == 1
    assert [row["state"] for row in agent.events.shards_table().values()] == [32, 8]
    del model, optimizer
    gc.collect()
    assert agent.events.models_table() == {} and (len(ahead), len(after)) == before


def test_an_optimizer_that_is_given_is_measured_at_once(agent: OneAgent) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    watch_model(model, optimizer=optimizer)
    rows = agent.events.shards_table()
    assert {key: (row["gradient"], row["state"]) for key, row in rows.items()} == {
        "model/weight": (32, 68), "model/bias": (8, 20),
    }  # fmt: skip


def test_a_stage_of_torchs_pipelines_is_watched_as_such(mesh: DeviceMesh, agent: OneAgent) -> None:
    from torch.distributed.pipelining import PipelineStage

    stage = PipelineStage(nn.Linear(4, 4), 1, 4, torch.device("cpu"))
    watch_model(stage, "pipe")
    (row,) = agent.events.models_table().values()
    assert (row["model"], row["stage"], row["rank"], row["world"]) == ("pipe", 1, 1, 4)


def test_what_cannot_be_watched_is_told(agent: OneAgent) -> None:
    with pytest.raises(TypeError, match=r"watch_model watches an nn\.Module or a stage of one, not a list"):
        watch_model([1])
    with pytest.raises(ValueError, match="a watched model has a name without a slash, not 'a/b'"):
        watch_model(nn.ReLU(), "a/b")
    assert watch_variable("nothing") == "there is no variable nothing"
