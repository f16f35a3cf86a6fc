"""Checkpoints of sharded models: training goes on under other numbers of ranks and other meshes as in one process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from spoiled import disk_of
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.errors import CollectiveError
from rpcbench.base.futures import wait_all
from rpcbench.distributed import sharded_files
from rpcbench.distributed.sharded_files import load_sharded, save_sharded

OnRanks = Callable[..., list[Any]]


def model(seed: int = 3, width: int = 18) -> nn.Sequential:
    """A model that four ranks cannot share in equal pieces."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 10), nn.BatchNorm1d(10), nn.Linear(10, 1))


def sharded(net: nn.Sequential, way: str) -> nn.Module:
    """Shard a model over the ranks of the group: "fsdp", "tp", "fsdp x tp", "ddp", or "plain"."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if way == "plain":
        return net
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    size = dist.get_world_size()
    names = {"fsdp": ("dp",), "tp": ("tp",), "fsdp x tp": ("dp", "tp")}[way]
    mesh = init_device_mesh("cpu", (size,) if len(names) == 1 else (size // 2, 2), mesh_dim_names=names)
    if "tp" in names:
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "dp" in names:
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh["dp"])
    return net


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Train with the same data on all ranks, so that any sharding has the result of one process; return the losses."""
    losses = []
    x = torch.rand(12, 8, generator=torch.Generator().manual_seed(5))
    for _ in range(steps):
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_and_save(way: str, path: Path) -> list[float]:
    net = sharded(model(), way)
    optimizer = adam(net)
    train(net, optimizer)
    save_sharded(net, path, optimizer)
    return train(net, optimizer)


def load_and_train(way: str, path: Path) -> list[float]:
    net = sharded(model(seed=9), way)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)  # the file has the learning rate
    load_sharded(net, path, optimizer)
    return train(net, optimizer)


# -- on several ranks
@pytest.fixture(scope="module")
def cluster() -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(4) as made:
        yield made


@pytest.fixture
def on_ranks(cluster: rpcbench.Cluster, tmp_path: Path) -> OnRanks:
    """A function that runs a function in a new group of so many ranks, and returns the results in order of rank."""

    def run(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        meeting = tmp_path / secrets.token_hex(4)
        given = [(meeting, rank, count, function, args) for rank in range(count)]
        return wait_all([cluster.rpc_async(f"worker{each[1] + 1}", _in_group, each) for each in given])

    return run


def _in_group(meeting: Path, rank: int, count: int, function: Callable[..., Any], args: Any) -> Any:
    dist.init_process_group("gloo", f"file://{meeting}", count, rank, timeout=60)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


@pytest.mark.process
@pytest.mark.parametrize(("writers", "way", "readers", "other"), [
    (4, "fsdp", 2, "fsdp"), (4, "fsdp x tp", 2, "tp"), (2, "ddp", 4, "fsdp x tp"),
])  # fmt: skip
def test_training_goes_on_under_another_number_of_ranks_and_in_one_process(
    on_ranks: OnRanks, tmp_path: Path, writers: int, way: str, readers: int, other: str
) -> None:
    net = model()
    optimizer = adam(net)
    train(net, optimizer)
    expected = train(net, optimizer)
    for losses in on_ranks(writers, train_and_save, way, tmp_path / "kept"):
        assert losses == pytest.approx(expected, rel=1e-5)
    for losses in on_ranks(readers, load_and_train, other, tmp_path / "kept"):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert load_and_train("plain", tmp_path / "kept") == pytest.approx(expected, rel=1e-5)
    assert {path.name for path in tmp_path.iterdir() if "kept" in path.name} == {"kept"}


def differently(path: Path) -> list[str]:
    """Call with another path, then with another model, on rank 1, then alike; return the errors."""
    told, odd = [], dist.get_rank() == 1
    for wide, place in ((18, path / f"to{odd:d}"), (18 + odd, path / "same"), (18, path / "same")):
        try:
            save_sharded(model(width=wide), place)
            told.append("")
        except CollectiveError as error:
            told.append(str(error))
    return told


@pytest.mark.process
def test_ranks_that_differ_in_path_or_model_are_refused_before_anything_is_written(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    for by_path, by_model, alike in on_ranks(2, differently, tmp_path / "made"):
        assert "rank 0 (worker1) calls save_sharded(" in by_path and "/to0'" in by_path and "/to1'" in by_path
        assert "rank 1 (worker2) calls save_sharded(" in by_model and by_model.count("11 tensors #") == 2
        assert alike == ""  # the group stays usable
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["same"]


def save_with_a_full_disk(path: Path) -> list[str]:
    """Save, save again while rank 1 can write no file, then load; return the errors."""
    net, told = sharded(model(), "fsdp"), []
    save_sharded(net, path)
    wanted = [each.to_local().clone() for each in net.parameters()]
    with torch.no_grad():
        for each in net.parameters():
            each.add_(1)
    try:
        with disk_of(10 if dist.get_rank() == 1 else -1):
            save_sharded(net, path)
    except CollectiveError as error:
        told.append(str(error))
    load_sharded(net, path)
    assert all(torch.equal(each.to_local(), kept) for each, kept in zip(net.parameters(), wanted, strict=True))
    return told


@pytest.mark.process
def test_a_save_that_fails_on_one_rank_leaves_the_previous_checkpoint_and_names_the_rank(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    for told in on_ranks(2, save_with_a_full_disk, tmp_path / "kept"):
        (error,) = told
        assert error.startswith("save_sharded: write failed on rank 1 (worker2): ")
    assert {path.name for path in tmp_path.iterdir() if "kept" in path.name} == {"kept"}


def load_into_another_model(path: Path) -> str:
    try:
        load_sharded(sharded(model(width=20), "fsdp"), path)
    except CollectiveError as error:
        dist.barrier()
        return str(error)
    return ""


@pytest.mark.process
def test_all_ranks_say_once_that_a_checkpoint_is_of_another_model(on_ranks: OnRanks, tmp_path: Path) -> None:
    save_sharded(model(), tmp_path / "kept")
    told = on_ranks(2, load_into_another_model, tmp_path / "kept")
    assert told[0] == told[1] and "\n" not in told[0]
    assert "of another shape are 0.weight (18, 8), not (20, 8), 0.bias (18,), not (20,)" in told[0]


# -- in this process
Tensors = dict[str, torch.Tensor]


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, Any]:
    kept = {name: each.clone() for name, each in net.state_dict().items()}
    its = optimizer.state_dict()["state"]
    return kept, {number: {key: value.clone() for key, value in each.items()} for number, each in its.items()}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[name], each) for name, each in wanted.items())
    return torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else bool(found == wanted)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def scramble(path: Path) -> None:
    """Replace all bytes of a file, but not their number."""
    path.write_bytes(b"\1" * path.stat().st_size)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda folder: cut(folder / "__0_0.distcp"), r"__0_0\.distcp was cut short: it has \d+ bytes, not \d+"),
    "gone": (lambda folder: (folder / "__0_0.distcp").unlink(), r"__0_0\.distcp of the checkpoint is missing"),
    "scrambled": (lambda folder: scramble(folder / "__0_0.distcp"), "load_sharded: read failed on this process: "),
    "metadata cut": (lambda folder: cut(folder / ".metadata"), r"\.metadata is damaged: "),
    "metadata scrambled": (lambda folder: scramble(folder / ".metadata"), r"\.metadata is damaged: "),
    "metadata gone": (lambda folder: (folder / ".metadata").unlink(), "has no complete checkpoint"),
    "replaced": (lambda folder: folder.rename(folder.with_name(".kept.old")), r"a save was killed .* is .*\.kept\.old"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path, how: str) -> None:
    net = model()
    optimizer = adam(net)
    train(net, optimizer)
    save_sharded(net, tmp_path / "kept", optimizer)
    train(net, optimizer)
    before = state_of(net, optimizer)
    damage, words = DAMAGE[how]
    damage(tmp_path / "kept")
    with pytest.raises(CollectiveError, match=words):
        load_sharded(net, tmp_path / "kept", optimizer)
    assert same(state_of(net, optimizer), before)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_with_names(tmp_path: Path) -> None:
    net = model()
    optimizer = adam(net)
    train(net, optimizer)
    save_sharded(net, tmp_path / "kept", optimizer)
    save_sharded(net, tmp_path / "model")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch_save(net.state_dict(), checkpoint_id=tmp_path / "flat", no_dist=True)
    two = [{"params": net[0].parameters()}, {"params": net[2:].parameters()}]
    mixed = [{"params": net[2].parameters()}, {"params": [*net[0].parameters(), *net[3:].parameters()]}]
    save_sharded(net, tmp_path / "two", torch.optim.SGD(two, lr=0.1))
    cases = [
        (net[:3], None, "kept", r"it has besides 3\.weight, 3\.bias, 3\.running_mean, 3\.running_var, .* and 2 more"),
        (nn.Sequential(*net, nn.Linear(1, 1)), None, "kept", r"another model: it lacks 5\.weight, 5\.bias\."),
        (net, None, "flat", r"another model: it lacks 0\.weight"),
        (net, optimizer, "model", "has no state of an optimizer: it was saved without one"),
        (net, torch.optim.SGD(net.parameters()), "kept", "only one of the two has the option dampening, "),
        (net, torch.optim.AdamW(net[0].parameters()), "kept", r"only one of the two has exp_avg of 2\.weight"),
        (net, torch.optim.AdamW(two), "kept", "has 1 group of parameters, but the optimizer here has 2"),
        (net, torch.optim.SGD(mixed, lr=0.1), "two", "has other parameters in the groups of its optimizer"),
        (net, torch.nn.Linear(1, 1), "kept", r"optimizer must be a torch\.optim\.\S*Optimizer, not a Linear"),
        (net.state_dict(), None, "kept", r"model must be a torch\.nn\.\S*Module, not a OrderedDict"),
        (model().to("meta"), None, "kept", r"on the device meta: 0\.weight, .*\. Call to_empty first"),
        (net, None, "nothing", "nothing is not there, or is no folder"),
    ]
    for other, its, name, words in cases:
        before = state_of(net, optimizer)
        with pytest.raises(CollectiveError, match=words) as caught:
            load_sharded(other, tmp_path / name, its)
        assert "\n" not in str(caught.value)
        assert same(state_of(net, optimizer), before)
        assert its in (None, optimizer) or not getattr(its, "state", None)


def test_a_save_replaces_only_a_checkpoint_or_an_empty_folder(tmp_path: Path) -> None:
    net, file, folder = model(), tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    save_sharded(net, folder)
    save_sharded(net, folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CollectiveError, match=r"has files of no checkpoint, which a save would remove: notes\.txt\."):
        save_sharded(net, folder)
    with pytest.raises(CollectiveError, match="file is a file: give the path of a folder"):
        save_sharded(net, file)
    with pytest.raises(CollectiveError, match="Not a directory"):
        save_sharded(net, file / "inside")
    (folder / "notes.txt").unlink()
    load_sharded(net, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_in_a_group_that_torch_made_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        save_sharded(net := model(), tmp_path / "kept")
        load_sharded(other := model(seed=4), tmp_path / "kept")
    finally:
        c10d.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    save_sharded(net, tmp_path / "kept")


def test_a_save_that_cannot_replace_the_old_checkpoint_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    save_sharded(net, tmp_path / "kept")
    wanted = {name: each.clone() for name, each in net.state_dict().items()}
    train(net, adam(net))
    rename = sharded_files.files.rename_draft

    def fails_once_the_old_one_is_away(draft: Path, path: Path) -> None:
        if path.name == "kept":
            raise OSError("no more")
        rename(draft, path)

    monkeypatch.setattr(sharded_files.files, "rename_draft", fails_once_the_old_one_is_away)
    with pytest.raises(CollectiveError, match="no more"):
        save_sharded(net, tmp_path / "kept")
    load_sharded(net, tmp_path / "kept")
    assert same(dict(net.state_dict()), wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_save_before_the_first_step_changes_nothing_and_is_loaded_as_such(tmp_path: Path) -> None:
    net = model()
    optimizer = adam(net)
    net(torch.ones(3, 8)).sum().backward()
    gradients = [each.grad for each in net.parameters()]
    save_sharded(net, tmp_path / "kept", optimizer)
    assert not optimizer.state and all(a.grad is b for a, b in zip(net.parameters(), gradients, strict=True))
    other = model(seed=9)
    its = torch.optim.AdamW(other.parameters(), lr=0.5)
    train(other, its)
    load_sharded(other, tmp_path / "kept", its)
    assert not its.state and its.param_groups[0]["lr"] == 0.05
    assert train(other, its) == train(net, optimizer)
