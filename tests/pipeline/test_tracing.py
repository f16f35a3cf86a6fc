"""Traced models: they train like the model with any cut, skips and tied weights; unsupported ones are refused."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from small import grads, same, step_alike
from torch import Tensor, nn
from torch.nn import functional

from rpcbench.pipeline import Pipeline, PipelineError, split, traced
from rpcbench.pipeline.split import Stages, _largest_difference
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2"]


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(rate)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x)))) * self.scale + self.shift


class Language(nn.Module):
    """Embedding tied to the head, a skip from the embedding to the end, shapes that depend on the batch, two inputs."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block(rate) for _ in range(3)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = embedded = self.embed(tokens)
        samples, length = tokens.shape
        for layer in self.layers:
            h = layer(h).view(samples, length * 8).view(samples, length, 8)
        return {"hidden": h, "logits": self.head((h + embedded) * mask[..., None])}


def language(rate: float = 0.0) -> Language:
    torch.manual_seed(8)
    return Language(rate).double()


def data(samples: int) -> tuple[dict[str, Tensor], Tensor]:
    made = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 11, (samples, 5), generator=made)
    mask = torch.rand(samples, 5, generator=made) < 0.7
    return {"tokens": tokens, "mask": mask}, torch.randint(0, 11, (samples, 5), generator=made)


def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + output["hidden"].square().mean()


def stages(model: Language, at: list[str]) -> Stages:
    x, _ = data(4)
    return split(traced(model, (x["tokens"], x["mask"])), WORKERS, at=at)


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ("gpipe", ["layers.1"]),
        ("1f1b", ["head"]),
        ("interleaved", ["layers.0", "layers.1", "layers.2"]),
        ("zb1p", ["layers.0.linear", "layers.1", "head"]),
        ("zbv", ["layers.0", "layers.2", "head"]),
        ("dualpipev", ["layers.1", "layers.1.linear", "layers.2"]),
    ],
)
def test_a_traced_model_trains_like_the_model(agents: list[Agent], schedule: str, at: list[str]) -> None:
    model, (x, y) = language(), data(13)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cut = stages(language(), at)
    pipe = Pipeline(cut, schedule, 5, loss_fn, (torch.optim.SGD, {"lr": 0.1}))
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(model(**x), y)
        step_alike(pipe, model, loss, x, y)
        optimizer.step()
    state = pipe.state_dict()
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    found = pipe.predict((x["tokens"], x["mask"]))
    torch.testing.assert_close(found, model(**x), rtol=1e-12, atol=1e-12)


class Again(nn.Module):
    """Has a layer that runs in the first stage and in the last, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between, self.spare = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.twice(self.between(self.twice(x)).tanh())


def test_a_module_in_two_stages_gets_gradients_and_an_unused_one_keeps_its_state(agents: list[Agent]) -> None:
    torch.manual_seed(8)
    model, x = Again().double(), torch.rand(12, 3, dtype=torch.double)
    cut = split(traced(copy.deepcopy(model), x), WORKERS, at=["between"])
    pipe = Pipeline(
        cut, "1f1b", 4, functional.mse_loss, (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}), keep_gradients=True
    )
    loss = functional.mse_loss(model(x), x)
    loss.backward()
    wanted = {name: gradient for name, gradient in grads(model).items() if gradient is not None}
    with pipe.batch(x, x) as batch:
        same(batch.gradients(), wanted)
        batch.apply()
    same(pipe.gradients(), wanted)
    torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1).step()
    same(pipe.state_dict(), model.state_dict())
    model.load_state_dict(pipe.state_dict())
    pipe.load_state_dict(model.state_dict())


def test_dropout_of_a_traced_model_follows_train_and_eval(agents: list[Agent]) -> None:
    model, (x, y) = language(0.5), data(12)
    pipe = Pipeline(stages(model, ["layers.1"]), "gpipe", 3, loss_fn)
    assert all(module.training for module in model.modules()), "tracing does not change the mode"
    torch.testing.assert_close(pipe.predict(x)["logits"], model.eval()(**x)["logits"])
    losses = set()
    for _ in range(2):
        with pipe.batch(x, y) as batch:
            losses.add(batch.result.loss)
    assert len(losses) == 2, "dropout differs between steps"


def test_a_model_traced_in_evaluation_mode_stays_in_it_and_gives_a_warning(agents: list[Agent]) -> None:
    model, (x, y) = language(0.5).eval(), data(12)
    with pytest.warns(UserWarning, match=r"model\.train\(\)"):
        pipe = Pipeline(stages(model, ["layers.1"]), "gpipe", 3, loss_fn)
    assert not any(module.training for module in model.modules())
    with pipe.batch(x, y) as batch:
        assert batch.result.loss == pytest.approx(loss_fn(model(**x), y).item(), rel=1e-12)


def test_the_stages_of_a_trace_hold_the_tensors_of_the_model_itself() -> None:
    model = language()
    told = [tensor for stage in stages(model, ["layers.1"]).cut() for tensor in dict(stage.named_tensors()).items()]
    own = model.state_dict(keep_vars=True)
    assert all(tensor is own[name] for name, tensor in told if name in own)
    assert {name for name, _ in told} - set(own) == {f"layers.{n}.shift" for n in range(3)}


def test_a_stage_that_uses_a_module_twice_can_be_loaded(agents: list[Agent], tmp_path: Path) -> None:
    torch.manual_seed(8)
    model, x = Again().double(), torch.rand(12, 3, dtype=torch.double)

    def fresh() -> Pipeline:
        stages = split(traced(copy.deepcopy(model), x), ["worker1"])
        return Pipeline(
            stages, microbatches=2, loss_fn=nn.functional.mse_loss,
            optimizer=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        )  # fmt: skip

    pipe, again = fresh(), fresh()
    pipe.step(x, x)
    pipe.load_state_dict(pipe.state_dict())
    pipe.save(tmp_path)
    assert again.load(tmp_path) == 1
    assert pipe.step(x, x).loss == again.step(x, x).loss and pipe.step(x, x).loss == again.step(x, x).loss


def test_check_reports_the_difference_and_the_crossing_values() -> None:
    model, (x, _) = language(0.5), data(7)
    cut = stages(model, ["layers.1"])
    told = cut.check(x)
    assert told.difference == 0
    assert [(c.source, c.stage) for c in told.crossings] == [(0, 1)]
    assert told.crossings[0].values.count("float64[7, 5, 8]") == 2, "the output of layer 0, and the embedding"
    assert "stage 0 → 1: " in str(told) and "largest difference from the whole model: 0" in str(told)
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        model.layers[1].linear.weight = nn.Parameter(-model.layers[1].linear.weight)
    assert cut.check(x).difference > 0.01, "the stages still have the old weight"


def test_check_reports_on_a_split_sequential() -> None:
    row = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout())
    told = split(row, WORKERS, balance=[1, 2]).check(torch.ones(2, 3))
    assert told.difference == 0 and told.crossings[0].values == ("float32[2, 3]",) and told.crossings[0].nbytes == 24


class Named(nn.Module):
    """Gives an OrderedDict with its keys in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        made = {"a": x, "b": (x + 1, {"c": x * 2})}
        return OrderedDict((key, made[key]) for key in sorted(made, reverse=bool(self.calls % 2)))


def test_check_compares_outputs_by_their_keys() -> None:
    told = split([nn.Linear(3, 3), Named()], WORKERS, balance=[1, 1]).check(torch.ones(2, 3))
    assert told.difference == 0


def test_check_names_the_keys_that_differ() -> None:
    with pytest.raises(PipelineError, match="split model gives 'a', the whole one 'a', 'b'"):
        _largest_difference({"a": 1}, {"a": 1, "b": 2})
    with pytest.raises(PipelineError, match="split model gives dict, the whole one tuple"):
        _largest_difference({"a": 1}, (1,))
    assert _largest_difference({"a": torch.ones(2)}, OrderedDict(a=torch.zeros(2))) == 1
    assert _largest_difference(torch.tensor([1 + 1j]), torch.tensor([1 - 1j])) == 2


class Branches(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 3) + x


@pytest.mark.parametrize(
    ("model", "sample", "told"),
    [
        (Branches(nn.BatchNorm1d(3)), torch.ones(4, 3), "norm"),
        (Branches(nn.AlphaDropout()), torch.ones(4, 3), "dropout"),
        (Branches(Decides()), torch.ones(4, 3), "cannot be traced"),
        (Branches(Fixed()), torch.ones(4, 3), "cannot be traced for batches of any size"),
        (Branches(nn.Tanh()), torch.ones(1, 3), "two samples or more"),
        (Branches(nn.Tanh()), [torch.ones(4, 3)], "two samples or more"),
        (Decides(), torch.ones(3), "cannot be traced"),
    ],
)
def test_a_model_or_sample_that_cannot_be_traced_is_refused(model: nn.Module, sample: Any, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        traced(model, sample)
