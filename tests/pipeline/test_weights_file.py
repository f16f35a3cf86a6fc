"""Files of safetensors: other programs read them, and a file that is wrong changes nothing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from small import SGD, data, model, pipeline, same
from spoiled import disk_of
from torch import nn

from rpcbench.pipeline import Pipeline, PipelineError, split
from rpcbench.runtime.agent import Agent


def tied() -> nn.Sequential:
    """A model with one layer in three places, of which two fall into one stage, and an embedding tied to its head."""
    torch.manual_seed(6)
    shared = nn.Linear(5, 5)
    made = nn.Sequential(nn.Embedding(9, 5), shared, shared, nn.BatchNorm1d(5), shared, nn.Linear(5, 9))
    made[5].weight = made[0].weight
    return made


def tied_pipeline(net: nn.Sequential) -> Pipeline:
    return Pipeline(split(net, ["worker1", "worker2"]), microbatches=2)


def test_a_saved_file_fits_the_unsplit_model_and_a_pipeline_of_another_split(
    agents: list[Agent], tmp_path: Path
) -> None:
    pipe, (x, y) = pipeline(optimizer=SGD), data(16)
    pipe.step(x, y)
    pipe.save(tmp_path / "new" / "a.safetensors")
    held = load_file(tmp_path / "new" / "a.safetensors")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.safetensors"]
    net = model()
    net.load_state_dict(held)
    same(dict(net.state_dict()), pipe.state_dict())
    other = pipeline(schedule="zbv", optimizer=SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # these optimizers have no state that could be of other weights
        assert other.load(tmp_path / "new" / "a.safetensors") == other.optimizer_step == 0
    assert len(other.stages) == 4
    same(other.state_dict(), held)
    assert torch.equal(torch.cat([net(part) for part in x.chunk(4)]), other.predict(x))


def test_a_load_tells_that_optimizers_keep_their_state_and_the_count_of_steps_stays(
    agents: list[Agent], tmp_path: Path
) -> None:
    pipe, (x, y) = pipeline(optimizer=SGD), data(16)
    pipe.save(tmp_path / "a.safetensors")
    before = pipe.state_dict()
    pipe.step(x, y)
    with pytest.warns(UserWarning, match=r"a\.safetensors has .* only: the optimizers keep their state of 1 step "):
        assert pipe.load(tmp_path / "a.safetensors") == pipe.optimizer_step == 1
    same(pipe.state_dict(), before)
    pipe.step(x, y)
    assert pipe.optimizer_step == 2


def test_tied_weights_are_written_under_each_name_and_read_from_a_file_that_has_one_of_them(
    agents: list[Agent], tmp_path: Path
) -> None:
    net, pipe = tied(), tied_pipeline(tied())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    save_model(net, str(tmp_path / "one.safetensors"))
    assert len(load_file(tmp_path / "one.safetensors")) < len(net.state_dict())
    pipe.load(tmp_path / "one.safetensors")
    same(pipe.state_dict(), net.state_dict())
    pipe.save(tmp_path / "all.safetensors")
    held = load_file(tmp_path / "all.safetensors")
    assert held.keys() == net.state_dict().keys()
    fresh = tied()
    fresh.load_state_dict(held)
    same(dict(fresh.state_dict()), net.state_dict())


def wrong_files(folder: Path) -> dict[str, str]:
    """Make files that are refused: path → words of the error."""
    state = {name: tensor.contiguous() for name, tensor in model().state_dict().items()}
    whole = folder / "whole.safetensors"
    save_file(state, whole)
    (folder / "cut.safetensors").write_bytes(whole.read_bytes()[:-9])
    (folder / "short.safetensors").write_bytes(whole.read_bytes()[:9])
    (folder / "text.safetensors").write_text("no tensors at all")
    (folder / "folder.safetensors").mkdir()
    save_file({**state, "9.bias": torch.zeros(1)}, folder / "more.safetensors")
    save_file({**state, "0.weight": torch.zeros(16, 5)}, folder / "shape.safetensors")
    del state["3.bias"]
    save_file(state, folder / "less.safetensors")
    return {
        "cut": "is no file of safetensors, or was cut short",
        "short": "is no file of safetensors, or was cut short",
        "text": "is no file of safetensors, or was cut short",
        "folder": "is a folder, not a file",
        "none": "there is no file ",
        "more": r"does not fit this model, and nothing was loaded: it has besides 9\.bias",
        "shape": r"of another shape are 0\.weight \(16, 5\), not \(16, 6\)",
        "less": r"it lacks 3\.bias",
    }


def test_a_file_that_is_damaged_or_of_another_model_is_refused_and_changes_nothing(
    agents: list[Agent], tmp_path: Path
) -> None:
    pipe = pipeline(optimizer=SGD)
    pipe.step(*data(16))
    before = pipe.state_dict()
    for name, words in wrong_files(tmp_path).items():
        with pytest.raises(PipelineError, match=words) as caught:
            pipe.load(tmp_path / f"{name}.safetensors")
        assert f"{name}.safetensors" in str(caught.value) and "\n" not in str(caught.value)
        same(pipe.state_dict(), before)
    with pytest.raises(PipelineError, match=r"folder\.safetensors is a folder: give the path of a file"):
        pipe.save(tmp_path / "folder.safetensors")
    pipe.step(*data(16))
    assert pipe.optimizer_step == 2


def test_a_save_to_a_full_disk_leaves_the_previous_file_and_no_other(agents: list[Agent], tmp_path: Path) -> None:
    pipe, path = pipeline(optimizer=SGD), tmp_path / "kept" / "a.safetensors"
    pipe.save(path)
    kept = path.read_bytes()
    pipe.step(*data(16))
    with disk_of(len(kept) - 1), pytest.raises(PipelineError, match=r"a\.safetensors was not written, and a file that"):
        pipe.save(path)
    assert path.read_bytes() == kept and [*path.parent.iterdir()] == [path]
    pipe.save(path)
    same(load_file(path), pipe.state_dict())


def test_without_the_package_an_error_tells_how_to_install_it(
    agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for deed in (pipe.save, pipe.load):
        with pytest.raises(PipelineError, match=r"need the package safetensors: pip install safetensors"):
            deed(tmp_path / "a.safetensors")
    assert not [*tmp_path.glob("*safetensors*")]


def test_a_pipeline_does_not_take_such_a_file_for_its_checkpoints(agents: list[Agent], tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "a.safetensors", "checkpoint_every": 1}
    with pytest.raises(PipelineError, match=r"optimizers' state, which is not in a \.safetensors file"):
        pipeline(optimizer=SGD, **options)
