"""Stages with several named values: some skip stages, some are numbers without gradients; invalid names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import STAGES, grads, same
from torch import Tensor, nn
from torch.nn import functional

from rpcbench.pipeline import Pipeline, PipelineError, part, split
from rpcbench.pipeline.stage_graph import OUTSIDE, ValuePath
from rpcbench.runtime.agent import Agent

WORKERS = ["worker1", "worker2"]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        return {"ids": tokens.flip(1), "h": self.table(tokens) * mask[..., None], "keep": ~mask, "width": 6}


class Encode(nn.Module):
    """Gives one tensor under two names, which different modules take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        encoded = torch.tanh(self.linear(h))
        return encoded + h, encoded, encoded


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.table = nn.Embedding(11, 6)

    def forward(self, h: Tensor, ids: Tensor, enc: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) * enc + self.table(ids)


class Decode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, h: Tensor, enc: Tensor, same: Tensor, keep: Tensor, mask: Tensor, width: int) -> Tensor:
        mixed = (h * enc + same / width).masked_fill(keep[..., None], 0.5)
        return self.linear(mixed.sum(1) / mask.sum(1, keepdim=True))


class Whole(nn.Module):
    """The same model in one process."""

    def __init__(self, embed: Embed, encode: Encode, middle: Middle, decode: Decode) -> None:
        super().__init__()
        self.embed, self.encode, self.middle, self.decode = embed, encode, middle, decode

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        made = self.embed(tokens, mask)
        h, enc, same = self.encode(made["h"])
        return self.decode(self.middle(h, made["ids"], enc), enc, same, made["keep"], mask, made["width"])


def whole() -> Whole:
    torch.manual_seed(4)
    return Whole(Embed(), Encode(), Middle(), Decode()).double()


def parts(model: Whole) -> dict[str, Any]:
    return {
        "embed": part(model.embed, takes=("tokens", "mask"), gives=("h", "ids", "keep", "width")),
        "encode": part(model.encode, takes=("h",), gives=("h", "enc", "same")),
        "middle": part(model.middle, takes=("h", "ids", "enc"), gives=("h",)),
        "decode": part(model.decode, takes=("h", "enc", "same", "keep", "mask", "width")),
    }


def data(samples: int) -> tuple[dict[str, Tensor], Tensor]:
    made = torch.Generator().manual_seed(5)
    mask = torch.rand(samples, 5, generator=made) < 0.7
    mask[:, 0] = True
    tokens = torch.randint(0, 11, (samples, 5), generator=made)
    return {"tokens": tokens, "mask": mask}, torch.randint(0, 4, (samples,), generator=made)


def pipeline(model: Whole, schedule: str, **changes: Any) -> Pipeline:
    balance = {1: [2, 2], 2: [1, 1, 1, 1]}[STAGES[schedule]]
    stages = split(parts(model), WORKERS, balance=balance, inputs=("tokens", "mask"))
    return Pipeline(stages, schedule, **{"microbatches": 5, "loss_fn": functional.cross_entropy, **changes})


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("schedule", STAGES)
def test_gradients_of_values_that_skip_stages_equal_one_process(
    agents: list[Agent], schedule: str, recompute: str
) -> None:
    model, (x, y) = whole(), data(13)
    loss = functional.cross_entropy(model(**x), y)
    loss.backward()
    pipe = pipeline(model, schedule, recompute=recompute)
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), grads(model))
    assert batch.result.loss == pytest.approx(loss.item(), rel=1e-12)


def test_inputs_can_be_given_by_name_or_in_order(agents: list[Agent]) -> None:
    model, (x, y) = whole(), data(13)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = pipeline(whole(), "zbv", optimizer=(torch.optim.SGD, {"lr": 0.1}))
    for batch in (x, (x["tokens"], x["mask"])):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(**x), y)
        loss.backward()
        optimizer.step()
        assert pipe.step(batch, y).loss == pytest.approx(loss.item(), rel=1e-12)
    assert pipe.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(pipe.predict(x), model(**x), rtol=1e-12, atol=1e-12)


def test_a_value_goes_directly_to_the_stages_that_take_it(agents: list[Agent]) -> None:
    stages = split(parts(whole()), WORKERS, balance=[1, 1, 1, 1], inputs=("tokens", "mask")).cut([0, 1, 0, 1])
    routes = {stage.index: {way.stage for way in stage.ports.gives} for stage in stages}
    assert routes == {0: {1, 2, 3}, 1: {2, 3}, 2: {3}, 3: set()}
    assert stages[3].ports.takes == (
        ValuePath(OUTSIDE, (0,)),
        ValuePath(0, (1, 2)),
        ValuePath(1, (3, 4)),
        ValuePath(2, (5,)),
    )
    assert [stage.ports.inputs for stage in stages] == [(0, 1), (), (), (1,)]


def test_a_step_records_one_send_per_micro_batch_between_stages_that_share_values(agents: list[Agent]) -> None:
    seen: list[Any] = []
    pipe = pipeline(whole(), "gpipe", microbatches=3)
    with pipe.batch(*data(12)):
        for agent in agents[1:]:
            (row,) = agent.tables()["contexts"].values()
            seen.append([send["to"] for send in row["sends"]])
    assert seen[0].count(2) == 3, "one message with all values for stage 1, for each micro-batch"


class Ignores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, used: Tensor, unused: Tensor) -> Tensor:
        return self.linear(used)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.learned = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x * self.learned, self.learned.expand(len(x), 3)


class Three(nn.Module):
    def __init__(self, first: Both, second: Ignores) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.first(x)
        return self.second(a, b) + c


class Add(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


@pytest.mark.parametrize("schedule", ["gpipe", "zb1p", "zbv"])
def test_a_value_that_is_taken_and_not_used_gets_no_gradient(agents: list[Agent], schedule: str) -> None:
    model = Three(Both(), Ignores()).double()
    x, y = torch.randn(8, 3, dtype=torch.double), torch.randn(8, 3, dtype=torch.double)
    functional.mse_loss(model(x), y).backward()
    listed = {
        "first": part(model.first, gives=("a", "b", "c")),
        "second": part(model.second, takes=("a", "b"), gives=("a",)),
        "same": part(nn.Identity(), takes=("a",), gives=("a",)),
        "add": part(Add(), takes=("a", "c")),
    }
    balance = {1: [1, 3], 2: [1, 1, 1, 1]}[STAGES[schedule]]
    pipe = Pipeline(split(listed, WORKERS, balance=balance), schedule, 3, functional.mse_loss)
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), grads(model))


def test_a_sequential_in_the_list_can_be_cut_inside(agents: list[Agent]) -> None:
    model = Three(Both(), Ignores()).double()
    x = torch.randn(8, 3, dtype=torch.double)
    chain = nn.Sequential(Ignores().double(), nn.Tanh())
    listed = [part(model.first, gives=("a", "b", "c")), part(chain, takes=("a", "b"), gives=("d",)), Add()]
    listed[2] = part(Add(), takes=("d", "c"))
    stages = split(listed, WORKERS, at=["1.1"])
    assert [stage.names for stage in stages.cut()] == [("0", "1.0"), ("1.1", "2")]
    a, b, c = model.first(x)
    torch.testing.assert_close(Pipeline(stages).predict(x), torch.tanh(chain[0](a, b)) + c)


@pytest.mark.parametrize(
    ("model", "inputs", "told"),
    [
        ([nn.Tanh(), part(nn.Tanh(), takes=("h",))], (), "'1' takes 'h', but nothing before it has a name"),
        ([part(nn.Tanh(), gives=("g",)), part(nn.Tanh(), takes=("h",))], ("x",), "'1' takes 'h', but there are x, g"),
        ([nn.Tanh(), nn.Tanh()], "xy", "inputs must be a list"),
        ([nn.Tanh(), nn.Tanh()], ("x", "x"), "a name twice"),
    ],
)
def test_unknown_or_repeated_value_names_are_refused(model: list[Any], inputs: Any, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        split(model, WORKERS, inputs=inputs)


@pytest.mark.parametrize("names", ["h", (), (1,)])
def test_invalid_value_names_are_refused(names: Any) -> None:
    with pytest.raises(PipelineError, match="takes must be a list of names"):
        part(nn.Tanh(), takes=names)
    with pytest.raises(PipelineError, match="gives="):
        part(nn.Tanh(), gives=("h", "h"))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Pipeline(split([Both(), Add()], WORKERS)).predict(torch.ones(8, 3)), "stage 0 gives tuple of 3"),
        (
            lambda: Pipeline(split([part(Both(), gives=("a", "b")), Add()], WORKERS)).predict(torch.ones(8, 3)),
            "'0' gives a, b, but its forward returned tuple of 3",
        ),
        (lambda: pipeline(whole(), "gpipe").predict({"tokens": torch.ones(8, 3)}), "the batch has no 'mask'"),
        (lambda: pipeline(whole(), "gpipe").predict(torch.ones(8, 3)), "tokens, mask, but the batch has 1"),
    ],
)
def test_values_that_do_not_match_their_names_are_refused(agents: list[Agent], make: Any, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        make()
    assert agents[0].call("worker1", torch.add, (torch.ones(1), 1)).wait() == 2
