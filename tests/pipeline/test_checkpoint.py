"""Checkpoints: training goes on from them to the same result, and an incomplete one is never loaded."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spoiled import DAMAGE, damaged, disk_of
from torch import nn
from torch.nn import functional

from rpcbench import Cluster
from rpcbench.optim import optimizer_files
from rpcbench.pipeline import Pipeline, PipelineError, StageLostError, checkpoint, split
from rpcbench.pipeline.checkpoint import MANIFEST
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2"]
OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.01}),
]
STEPS = 6


def model(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
    return nn.Sequential(*layers, *more).double()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    return torch.rand(12, 6, dtype=torch.double, generator=made), torch.randint(0, 4, (12,), generator=made)


def pipeline(net: nn.Sequential | None = None, seed: int = 5, **options: Any) -> Pipeline:
    """Make a pipeline: its random numbers depend on `seed`, its first weights do not."""
    stages = split(net or model(), WORKERS)
    options = {"batch_norm": "microbatch", **options}
    torch.manual_seed(seed)
    fields: dict[str, Any] = {"microbatches": 3, "loss_fn": functional.cross_entropy, "optimizer": OPTIMIZERS[0]}
    return Pipeline(stages, **{**fields, **options})


def train(pipe: Pipeline, until: int = STEPS) -> list[float]:
    """Train from the current step to step `until`; return the losses."""
    assert pipe.optimizer_step is not None
    return [pipe.step(*batch(number)).loss for number in range(pipe.optimizer_step, until)]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_training_resumed_from_a_checkpoint_is_equal_to_the_last_bit(
    agents: list[Agent], tmp_path: Path, schedule: str, optimizer: Any
) -> None:
    whole = pipeline(schedule=schedule, optimizer=optimizer)
    losses = train(whole)
    first = pipeline(schedule=schedule, optimizer=optimizer)
    train(first, 3)
    first.save(tmp_path / "kept")
    train(first, 5)
    second = pipeline(schedule=schedule, optimizer=optimizer, seed=99)
    assert second.load(tmp_path / "kept") == second.optimizer_step == 3
    assert train(second) == losses[3:]
    assert same(second.state_dict(), whole.state_dict())
    assert first.load(tmp_path / "kept") == 3 and train(first) == losses[3:]


def test_a_checkpoint_can_be_loaded_into_another_split_and_schedule(agents: list[Agent], tmp_path: Path) -> None:
    first = pipeline(optimizer=OPTIMIZERS[1])
    train(first, 3)
    first.save(tmp_path)
    second = pipeline(schedule="zbv", optimizer=OPTIMIZERS[1])
    second.load(tmp_path)
    assert len(second.stages) == 4 and same(second.state_dict(), first.state_dict())
    assert train(second) == pytest.approx(train(first), rel=1e-12)
    found, expected = second.state_dict(), first.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_folder_keeps_only_the_latest_checkpoint(agents: list[Agent], tmp_path: Path) -> None:
    pipe = pipeline(checkpoint=tmp_path / "made" / "anew", checkpoint_every=2)
    train(pipe, 3)
    folder = tmp_path / "made" / "anew"
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["optimizer_step"] == 2
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [MANIFEST, *(written["file"] for written in manifest["stages"])]
    )
    assert [written["worker"] for written in manifest["stages"]] == WORKERS
    assert pipe.resume() == 2
    train(pipe, 4)
    assert json.loads((folder / MANIFEST).read_text())["optimizer_step"] == 4 and len(list(folder.iterdir())) == 3


def test_copies_of_a_tied_weight_stay_equal_after_a_load_into_another_split(
    agents: list[Agent], tmp_path: Path
) -> None:
    def tied(balance: list[int]) -> Pipeline:
        torch.manual_seed(3)
        shared = nn.Linear(6, 6)
        net = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 4)).double()
        return Pipeline(
            split(net, WORKERS, balance=balance), microbatches=3, loss_fn=functional.cross_entropy,
            optimizer=OPTIMIZERS[0],
        )  # fmt: skip

    one, other = tied([3, 1]), tied([2, 2])
    train(one, 2)
    one.save(tmp_path)
    assert other.load(tmp_path) == 2
    train(one, 4), train(other, 4)
    found, expected = other.state_dict(), one.state_dict()
    assert torch.equal(found["0.weight"], found["2.weight"])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", ["damage", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(agents: list[Agent], tmp_path: Path, change: str) -> None:
    pipe = pipeline()
    train(pipe, 2)
    pipe.save(tmp_path)
    (name,) = [each["file"] for each in json.loads((tmp_path / MANIFEST).read_text())["stages"] if each["stage"] == 1]
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    {
        "damage": lambda: (tmp_path / name).write_bytes(content),
        "cut": lambda: (tmp_path / name).write_bytes(content[:-9]),
        "remove": (tmp_path / name).unlink,
    }[change]()
    train(pipe, 3)
    before = pipe.state_dict()
    with pytest.raises(PipelineError, match=f"{name} (was changed|is missing)"):
        pipe.load(tmp_path)
    assert same(pipe.state_dict(), before) and pipe.optimizer_step == 3
    assert train(pipe, 4)


@pytest.mark.parametrize("most", [min, max])  # room for no stage file, and for one
def test_a_save_to_a_full_disk_fails_and_keeps_the_previous_checkpoint(
    agents: list[Agent], tmp_path: Path, most: Any
) -> None:
    pipe = pipeline()
    train(pipe, 2)
    pipe.save(tmp_path / "kept")
    before = sorted((tmp_path / "kept").iterdir())
    sizes = [path.stat().st_size for path in before if path.suffix == ".pt"]
    train(pipe, 3)
    with (
        disk_of(most(sizes) - 1),
        pytest.raises(OSError, match=r"worker[12] cannot write this file .*stage[01]") as caught,
    ):
        pipe.save(tmp_path / "kept")
    assert str(tmp_path / "kept" / "step3.stage") in caught.value.filename
    assert sorted((tmp_path / "kept").iterdir()) == before
    assert pipe.load(tmp_path / "kept") == 2 and train(pipe, 4)


def test_a_save_that_cannot_write_its_manifest_leaves_no_files(
    agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline()
    monkeypatch.setattr(optimizer_files.json, "dumps", lambda *args, **options: "x" * 2_000_000)
    with disk_of(1_000_000), pytest.raises(OSError, match=r"cannot write .*checkpoint\.json"):
        pipe.save(tmp_path / "kept")
    assert not [*(tmp_path / "kept").iterdir()]


def test_the_next_save_removes_the_files_of_a_killed_save(agents: list[Agent], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    for name in ("step1.stage0.01234567.pt", ".checkpoint.json.01234567.draft", "mine.txt"):
        (folder / name).write_text("half")
    pipeline().save(folder)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".pt", ".txt"}
    assert not (folder / "step1.stage0.01234567.pt").exists()


class Foreign:
    """A class that is not torch's: its unpickling could run any code."""


def test_a_stage_file_with_foreign_objects_or_without_tensors_is_refused(agents: list[Agent], tmp_path: Path) -> None:
    pipe = pipeline()
    train(pipe, 1)
    pipe.save(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    written = manifest["stages"][1]
    path = tmp_path / written["file"]
    held = torch.load(path, weights_only=True)
    before = pipe.state_dict()
    for change, told in (
        ({"more": Foreign()}, "holds objects of test_checkpoint.Foreign"),
        ({"tensors": {}}, "does not match its manifest"),
    ):
        torch.save({**held, **change}, path)
        written["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        (tmp_path / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(PipelineError, match=rf"{path.name} {told}") as caught:
            pipe.load(tmp_path)
        assert "weights_only" not in f"{caught.value}{caught.value.__cause__}"
        assert same(pipe.state_dict(), before)


@pytest.mark.parametrize("file", ["../other.pt", "/etc/passwd", "step1.stage0.01234567.pt/../x", 7])
def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(tmp_path: Path, file: Any) -> None:
    stage = {"file": file, "bytes": 1, "sha256": "0", "shapes": {}, "names": {}, "groups": 0}
    fields = {
        "format": checkpoint._FORMAT,
        "optimizer_step": 1,
        "optimizer": "",
        "seeds": {"base": 1, "drawn": 1},
        "stages": [stage],
    }
    (tmp_path / MANIFEST).write_text(json.dumps(fields))
    with pytest.raises(PipelineError, match=r"checkpoint\.json (names files|is not a checkpoint manifest)"):
        checkpoint._read_manifest(tmp_path, "")


WRITTEN = {
    "file": "step3.stage0.01234567.pt", "bytes": 9, "sha256": "0", "shapes": {"a": [2]}, "names": {"0.a": "a"},
    "groups": 1,
}  # fmt: skip
SEEDS = {"base": 1, "drawn": 2}
WHOLE = json.dumps(
    {"format": checkpoint._FORMAT, "optimizer_step": 3, "optimizer": "SGD", "seeds": SEEDS, "stages": [WRITTEN]}
)


@DAMAGE
@given(data=st.data())
def test_an_error_about_a_damaged_manifest_names_its_folder(tmp_path: Path, data: Any) -> None:
    (tmp_path / MANIFEST).write_bytes(damaged(WHOLE.encode(), data.draw))
    try:
        found = checkpoint._read_manifest(tmp_path, "SGD")
    except PipelineError as error:
        assert str(tmp_path) in str(error)
    else:
        checkpoint._sources_by_stage(tmp_path, found, {0: {name: name for name in checkpoint._shapes_in(found)}})


def test_a_step_counts_though_the_checkpoint_after_it_fails(
    agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    pipe = pipeline(checkpoint=tmp_path, checkpoint_every=1)
    monkeypatch.setattr(optimizer_files, "publish_manifest", full)
    with pipe.batch(*batch(0)) as made:
        with pytest.raises(OSError, match="no space left") as told:
            made.apply(last=True)
        assert told.value.__notes__ == ["optimizer step 1 is done; the checkpoint after it failed"]
        # so that no worker is asked to release what it has released
        assert made.applied and len(made._released_ids) == 2
    assert pipe.optimizer_step == 1


def test_resume_from_a_folder_without_a_manifest_is_refused(agents: list[Agent], tmp_path: Path) -> None:
    pipe = pipeline(checkpoint=tmp_path, checkpoint_every=1)
    with pytest.raises(PipelineError, match=r"no whole checkpoint: there is no checkpoint\.json"):
        pipe.resume()
    train(pipe, 1)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(PipelineError, match="no whole checkpoint"):
        pipe.resume()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: pipeline(checkpoint=folder), "give both, a folder and a number"),
        (lambda folder: pipeline(checkpoint_every=2), "give both, a folder and a number"),
        (lambda folder: pipeline(checkpoint=folder, checkpoint_every=-1), "of at least 1"),
        (lambda folder: pipeline().resume(), "checkpoint_every is 0, so this pipeline has no checkpoint"),
        (lambda folder: pipeline(optimizer=OPTIMIZERS[1]).load(folder), "optimizer 'torch.optim.sgd.SGD', not 'torch"),
        (lambda folder: pipeline(model(nn.PReLU())).load(folder), r"does not fit .* lacks 6\.weight"),
        (lambda folder: pipeline(model()[:5]).load(folder), r"has besides 5\.weight, 5\.bias"),
        (
            lambda folder: pipeline(nn.Sequential(nn.Linear(5, 8), *list(model())[1:])).load(folder),
            r"of another shape are 0\.weight \(8, 6\), not \(8, 5\)",
        ),
    ],
)
def test_a_checkpoint_or_option_that_does_not_fit_is_refused_with_the_reason(
    agents: list[Agent], tmp_path: Path, make: Any, words: str
) -> None:
    pipe = pipeline()
    train(pipe, 1)
    pipe.save(tmp_path / "kept")
    with pytest.raises(PipelineError, match=words):
        make(tmp_path / "kept")


def test_a_loaded_state_reaches_all_stages_and_a_wrong_one_is_refused(agents: list[Agent]) -> None:
    net, pipe = model(), pipeline()
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.add_(1)
    pipe.load_state_dict(net.state_dict())
    assert same(pipe.state_dict(), dict(net.state_dict()))
    assert torch.equal(pipe.predict(batch(0)[0]), torch.cat([net.eval()(part) for part in batch(0)[0].chunk(3)]))
    state = {**net.state_dict(), "0.weight": torch.zeros(8, 5)}
    del state["5.bias"]
    with pytest.raises(PipelineError, match=r"it lacks 5\.bias; of another shape are 0\.weight"):
        pipe.load_state_dict(state)
    assert same(pipe.state_dict(), dict(net.state_dict()))


# -- after a death
class Frail(nn.Module):
    """Ends its process in the phase that the name of a file states."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.double))

    def die(self, sign: str) -> None:
        if (self.folder / sign).exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.die("forward")
        if x.requires_grad:
            x.register_hook(lambda gradient: self.die("backward"))  # type: ignore[no-untyped-call]
        return x * self.scale

    def _save_to_state_dict(self, *args: Any) -> None:
        self.die("save")
        super()._save_to_state_dict(*args)


@pytest.mark.process
@pytest.mark.parametrize(("phase", "every", "goes_on_from", "optimizer"), [
    ("backward", 2, 2, OPTIMIZERS[1]), ("save", 1, 3, OPTIMIZERS[0]),
    pytest.param("forward", 1, 3, OPTIMIZERS[0], marks=pytest.mark.long),
    pytest.param("between", 1, 3, OPTIMIZERS[1], marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_resumed_after_a_death_ends_like_an_undisturbed_one(
    cluster: Cluster, tmp_path: Path, optimizer: Any, phase: str, every: int, goes_on_from: int
) -> None:
    def fresh(seed: int = 5, **options: Any) -> Pipeline:
        return pipeline(model(nn.Dropout(0.2), Frail(tmp_path)), seed, optimizer=optimizer, **options)

    whole = fresh()
    losses, ended = train(whole), whole.state_dict()
    kept: dict[str, Any] = {"checkpoint": tmp_path / "kept", "checkpoint_every": every}
    pipe = fresh(**kept)
    train(pipe, 3)
    (tmp_path / phase).touch()
    with pytest.raises(StageLostError, match="worker2 was lost"), pipe.batch(*batch(3)) as made:
        if phase == "between":
            cluster.kill("worker2")
        made.apply()
    (tmp_path / phase).unlink()
    cluster.restart("worker2")
    again = fresh(99, **kept)
    assert again.resume() == goes_on_from
    assert train(again) == losses[goes_on_from:]
    assert same(again.state_dict(), ended)
    names = {each["file"] for each in json.loads((tmp_path / "kept" / MANIFEST).read_text())["stages"]}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {MANIFEST, *names}
