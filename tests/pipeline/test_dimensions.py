"""Named tensors between stages, and parts that state the dimension names of their inputs and outputs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from small import STAGES, grads, same
from torch import Tensor, nn
from torch.nn import functional

from rpcbench import named
from rpcbench.named import NamedTensor, name_parameters
from rpcbench.pipeline import Pipeline, PipelineError, part, split
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2"]
Y = torch.tensor([0, 2, 1, 3, 3, 1, 0])


def x() -> Tensor:
    return torch.rand(7, 6, dtype=torch.double, generator=torch.Generator().manual_seed(5))


def layer(takes: int, gives: int, *names: str) -> nn.Linear:
    """A layer from dimension `names[0]` to dimension `names[1]`, or one without names."""
    made = nn.Linear(takes, gives)
    return name_parameters(made, weight=names[::-1], bias=names[1:]) if names else made


def chain(*, names: bool) -> nn.Sequential:
    """A model with the same weights each time, with or without names."""
    torch.manual_seed(3)
    sizes = [(6, 16, "C", "H"), (16, 16, "H", "F"), (16, 4, "F", "K")]
    first, second, third = [layer(a, b, *(n if names else ())) for a, b, *n in sizes]
    return nn.Sequential(first, nn.Tanh(), second, third).double()


class Encode(nn.Module):
    """Uses dimensions by their names only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = layer(6, 6)

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.linear(x.rename(None)))
        return h, x.sum("C"), 3


class Decode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer(6, 4)

    def forward(self, h: Any, total: Any) -> Any:
        return self.linear((h * total.align_as(h)).rename(None))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encode, self.middle, self.decode = Encode(), layer(6, 6), Decode()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h, total, _ = self.encode(named.named(x, "N", "C"))
        return self.decode(named.named(self.middle(h), "N", "H"), total)


def stating(model: Whole, **changes: Any) -> dict[str, Any]:
    """The parts of the model, each with the dimension names of its inputs and outputs."""
    dims: dict[str, Any] = {"x": ("N", "C"), "raw": None, "total": ("N",), "h": ("N", "H"), "y": ("N", "K"), **changes}

    def of(*names: str) -> dict[str, Any]:
        return {name: dims[name] for name in names}

    return {
        "encode": part(model.encode, takes=of("x"), gives={**of("raw", "total"), "n": None}),
        "middle": part(model.middle, takes=("raw",), gives=of("h")),
        "decode": part(model.decode, takes={"h": changes.get("taken"), "total": None}, gives=of("y")),
    }


def pipeline(model: Any, schedule: str = "1f1b", balance: Any = None, **changes: Any) -> Pipeline:
    balance = balance or {1: [2, 2], 2: [1, 1, 1, 1]}[STAGES[schedule]]
    stages = split(model, WORKERS, balance=balance, inputs=("x",) if isinstance(model, dict) else ())
    fields: dict[str, Any] = {"microbatches": 3, "loss_fn": functional.cross_entropy}
    return Pipeline(stages, schedule, optimizer=(torch.optim.SGD, {"lr": 0.3}), **{**fields, **changes})


@pytest.mark.parametrize(("schedule", "recompute"), [*((each, "none") for each in STAGES), ("zbv", "all")])
def test_named_tensors_and_gradients_keep_their_names_between_stages(
    agents: list[Agent], schedule: str, recompute: str
) -> None:
    plain, model = chain(names=False), chain(names=True)
    functional.cross_entropy(plain(x()), Y).backward()
    pipe = pipeline(chain(names=True), schedule, recompute=recompute)
    with pipe.batch(named.named(x(), "N", "C"), Y) as batch:
        found = batch.gradients()
        batch.apply()
    same({name: gradient.rename(None) for name, gradient in found.items()}, grads(plain))
    assert {n: g.names for n, g in found.items()} == {n: p.names for n, p in model.named_parameters()}
    assert pipe.predict(named.named(x(), "N", "C")).names == ("N", "K")


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_parts_that_state_names_train_like_the_whole_model(agents: list[Agent], schedule: str) -> None:
    model = Whole()
    functional.cross_entropy(model(x()), Y).backward()
    row = [*stating(Whole()).items()]
    row = {**dict(row[:2]), "same": part(nn.Identity(), takes=("h",), gives={"h": ("N", "H")}), **dict(row[2:])}
    pipe = pipeline(row, schedule, [1, 3] if STAGES[schedule] == 1 else None)
    with pipe.batch(x(), Y) as batch:
        same(batch.gradients(), grads(model))
        batch.apply()
    found = pipe.predict(x())
    assert (type(found), found.names) == (NamedTensor, ("N", "K"))


def test_values_that_cross_a_cut_are_shown_with_their_dimension_names() -> None:
    stages = split(stating(Whole()), WORKERS, balance=[2, 1], inputs=("x",))
    (crossing,) = stages.check(x()).crossings
    assert crossing.values == ("float64[N=7]", "float64[N=7, H=6]")


def test_parts_that_state_names_can_be_balanced_by_memory_and_time() -> None:
    split(stating(Whole()), WORKERS, balance="memory", sample=x(), inputs=("x",)).cut()
    split(stating(Whole()), WORKERS, balance="time", sample=x(), inputs=("x",)).cut()


WRONG = [
    ({"total": ("C",)}, x(), "stage 0, 'encode' gives 'total' as (C), but it is (N=7)"),
    ({"h": ("N", "H", "E")}, x(), "stage 0, 'middle' gives 'h' as (N, H, E), but it is (7, 6)"),
    ({}, named.named(x(), "C", "N"), "stage 0, 'encode' takes 'x' as (N, C), but it is (C=7, N=6)"),
    ({"h": None, "taken": ("N", "H", "E")}, x(), "stage 1, 'decode' takes 'h' as (N, H, E), but it is (7, 6)"),
    ({"y": ("N", "K", "E")}, x(), "stage 1, 'decode' gives 'y' as (N, K, E), but it is (7, 4)"),
]


@pytest.mark.parametrize(("changes", "batch", "words"), WRONG)
def test_an_error_about_wrong_names_states_the_part_and_the_value(changes: Any, batch: Any, words: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(words)):
        split(stating(Whole(), **changes), WORKERS, balance=[2, 1], inputs=("x",)).check(batch)


def test_a_part_that_states_only_the_names_of_its_input_checks_them() -> None:
    stages = split([part(nn.Identity(), takes={"x": ("N", "C")}), nn.Identity()], WORKERS, inputs=("x",))
    assert stages.check(x()).crossings[0].values == ("float64[N=7, C=6]",)
    with pytest.raises(PipelineError, match="stage 0, '0' takes 'x' as"):
        stages.check(x()[0])


def test_a_step_with_wrong_names_changes_nothing_and_the_next_one_runs(agents: list[Agent]) -> None:
    pipe = pipeline(stating(Whole()), balance=[2, 1])
    with pytest.raises(PipelineError, match=r"stage 0, 'encode' takes 'x' as \(N, C\), but it is \(C=3, N=6\)"):
        pipe.step(named.named(x(), "C", "N"), Y)
    assert pipe.step(named.named(x(), "N", "C"), Y).loss == pytest.approx(
        functional.cross_entropy(Whole()(x()), Y).item(), rel=1e-12
    )


def test_dimension_names_for_a_number_are_refused(agents: list[Agent]) -> None:
    row = [part(Encode().double(), gives={"h": None, "total": None, "n": ("N",)}), part(nn.Identity(), takes=("h",))]
    with pytest.raises(PipelineError, match=r"'0' gives 'n' as \(N\), but it is no tensor: 3"):
        split(row, WORKERS, balance=[1, 1]).check(named.named(x(), "N", "C"))


class Dict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x, "b": x[0], "more": x}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[0]


@pytest.mark.parametrize("last", [Dict(), Pair()])
def test_an_output_of_several_values_gets_names_and_keeps_its_structure(last: nn.Module) -> None:
    row = [nn.Identity(), part(last, gives={"a": ("N", "C"), "b": None})]
    made = split(row, WORKERS, balance=[1, 1]).cut()[1].module(x())
    values = [*made.values()] if isinstance(made, dict) else [*made]
    assert list(made) == ["a", "b", "more"] if isinstance(made, dict) else type(made) is tuple
    assert [getattr(value, "names", None) for value in values[:2]] == [("N", "C"), None]


def test_parts_that_state_different_names_for_one_value_are_refused() -> None:
    words = r"'decode' takes 'h' as \(H, N\), but 'middle' gives it as \(N, H\): state the same names"
    with pytest.raises(PipelineError, match=words):
        split(stating(Whole(), taken=("H", "N")), WORKERS, inputs=("x",))
    split(stating(Whole(), h=("N", None), taken=("N", "H")), WORKERS, inputs=("x",))


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ("NC", r"takes={'x': 'NC'}: names of dimensions are a tuple"),
        (("N", "N"), r"takes={'x': \('N', 'N'\)}: 'N' would occur twice"),
        (("N", "1"), r"takes={'x': \('N', '1'\)}: '1' is no name of a dimension"),
    ],
)
def test_invalid_dimension_names_are_refused(dims: Any, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        part(nn.Identity(), takes={"x": dims})
