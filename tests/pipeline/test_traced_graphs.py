"""Traces with more than plain operations: nested graphs, vmap, dropout in attention, Functions, unused parameters."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rpcbench.pipeline import PipelineError, split, traced
from rpcbench.pipeline.split import Stage

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))


class Around(nn.Module):
    """A layer, then the module under test, then a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 3), inner, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.inner(self.first(x)))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)


class Chooses(Inner):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: -self.linear(x), (x,))


class Rests(Inner):
    """Dropout in a region without gradients, and a layer in a region of low precision."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.drop(x.abs() + 1)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.linear(x)
        return low.float() * scale


class Maps(Inner):
    def forward(self, x: Tensor) -> Any:
        return torch.vmap(lambda row: self.linear(row) * row.sum())(x)


class Recomputes(Inner):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: self.linear(x).tanh(), x, use_reentrant=self.reentrant)


class Attends(Inner):
    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, x[:, None], dropout_p=0.5 if self.training else 0.0)[
            :, 0
        ]


class Straight(torch.autograd.Function):
    """Rounds; its gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounds(Inner):
    def forward(self, x: Tensor) -> Any:
        return Straight.apply(self.linear(x))


def stages(model: nn.Module, sample: Any = X) -> list[Stage]:
    return split(traced(model, sample), ["worker1", "worker2"], at=["last"]).cut()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # torch itself gives it, for torch.cond
@pytest.mark.parametrize("inner", [Chooses(), Rests(), Maps(), Recomputes(False), Attends()])
def test_a_traced_graph_computes_the_same_as_the_model(inner: nn.Module) -> None:
    model = Around(inner)
    cut = stages(model)
    first, last = parts = [pickle.loads(pickle.dumps(stage.module)) for stage in cut]
    for x in (X, torch.cat([X, -X, X])):
        torch.manual_seed(1)
        wanted = model(x)
        torch.manual_seed(1)
        made = last(*first(x))
        assert torch.equal(made, wanted)
    wanted.sum().backward()
    made.sum().backward()
    found = {
        s.unsplit_name(own): p.grad for s, part in zip(cut, parts, strict=True) for own, p in part.named_parameters()
    }
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("inner", [Rests(), Attends()])
def test_dropout_in_a_nested_graph_follows_the_training_mode(inner: nn.Module) -> None:
    first, _ = (stage.module for stage in stages(Around(inner)))
    assert len({str(first(X)[0].tolist()) for _ in range(20)}) > 1  # two masks of few bits may be equal
    assert torch.equal(first.eval()(X)[0], first(X)[0])


@pytest.mark.parametrize(
    ("inner", "told"),
    [(Rounds(), r"Straight, a torch\.autograd\.Function"), (Recomputes(True), "use_reentrant=False")],
)
def test_a_user_defined_backward_is_refused(inner: nn.Module, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        traced(Around(inner), X)


def test_tracing_does_not_change_the_random_state() -> None:
    model, before = Around(Attends()), torch.get_rng_state()
    traced(model, X)
    assert torch.equal(torch.get_rng_state(), before)


class Scales(Inner):
    """Has a buffer and a constant that the last part uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.shift = torch.full((3,), 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.shift


class ScalesAgain(Around):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.inner.scale + self.inner.shift


def test_a_buffer_of_a_trace_can_be_in_several_stages() -> None:
    model = ScalesAgain(Scales())
    first, last = stages(model)
    assert torch.equal(last.module(*first.module(X)), model(X))
    assert "inner.scale" in {first.unsplit_name(own) for own in first.module.state_dict()}


class Leftovers(Around):
    """Has an unused layer and buffer, and a second name of a parameter that is used."""

    def __init__(self) -> None:
        super().__init__(Maps())
        self.inner.spare = nn.Linear(2, 2)
        self.inner.register_buffer("count", torch.ones(2))
        self.other = nn.Module()
        self.other.weight = self.last.weight


def test_the_stages_of_a_trace_have_the_whole_state_of_the_model() -> None:
    model = Leftovers()
    first, last = stages(model)
    keys = {stage.index: {stage.unsplit_name(own) for own in stage.module.state_dict()} for stage in (first, last)}
    assert keys[0] | keys[1] == model.state_dict().keys()
    assert {"inner.spare.weight", "inner.spare.bias", "inner.count"} <= keys[0]
    assert {"last.weight", "other.weight"} <= keys[1], "one module has both names, so they stay one parameter"
    own = model.state_dict(keep_vars=True)
    assert all(tensor is own[name] for stage in (first, last) for name, tensor in stage.named_tensors())
