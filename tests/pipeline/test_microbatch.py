"""Micro-batches: all samples once and in order, and weighted losses with the gradients of the whole batch."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.microbatch import (
    count_samples,
    join_microbatches,
    loss_weights,
    microbatch_bounds,
    microbatch_sizes,
    part,
    share_of_replica,
    split_batch,
)

Pair = namedtuple("Pair", ["left", "right"])


class Output(dict[str, object]):
    """A class that torch does not know; its constructor needs more than a dict."""

    def __init__(self, kind: str, **fields: object) -> None:
        super().__init__(fields)
        self.kind = kind


@given(st.integers(1, 40), st.data())
def test_micro_batches_have_the_sizes_of_tensor_split(samples: int, data: st.DataObject) -> None:
    microbatches = data.draw(st.integers(1, samples))
    assert microbatch_sizes(samples, microbatches) == [
        len(part) for part in torch.arange(samples).tensor_split(microbatches)
    ]


def test_a_nested_batch_is_cut_and_joined_without_change() -> None:
    ids, mask = torch.arange(7), torch.rand(7, 2, 3)
    batch = {"ids": ids, "pair": Pair(mask, [mask, ids]), "more": (), "same": (ids,)}
    parts = split_batch(batch, 3)
    assert [count_samples(part) for part in parts] == [3, 2, 2]
    assert torch.equal(parts[1]["pair"].right[0], mask[3:5])
    back = join_microbatches(parts)
    assert list(back) == list(batch) and type(back["pair"]) is Pair and type(back["pair"].right) is list
    assert back["more"] == () and type(back["same"]) is tuple
    assert torch.equal(back["ids"], ids) and torch.equal(back["pair"].right[0], mask)


@pytest.mark.parametrize("batch", [Output("kind", x=torch.arange(7)), OrderedDict(x=torch.arange(7))])
def test_micro_batches_of_a_dict_keep_its_class(batch: dict[str, torch.Tensor]) -> None:
    parts = split_batch(batch, 3)
    assert {type(part) for part in parts} == {type(batch)} == {type(join_microbatches(parts))}
    assert join_microbatches(parts)["x"].tolist() == list(range(7)) and parts[1]["x"].tolist() == [3, 4]


def test_micro_batches_are_views_of_the_batch() -> None:
    batch = torch.zeros(4, 2)
    split_batch(batch, 2)[1].fill_(1)
    assert batch.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("microbatches", [1, 4, 7, 60])
def test_weighted_losses_have_the_whole_batchs_gradients(reduction: str, microbatches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = {"x": torch.randn(60, 5, dtype=torch.float64), "y": torch.randint(3, (60,))}
    whole = gradients(model, functional.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction))
    parts = split_batch(batch, microbatches)
    loss = sum(
        weight * functional.cross_entropy(model(part["x"]), part["y"], reduction=reduction)
        for weight, part in zip(loss_weights([count_samples(part) for part in parts], reduction), parts, strict=True)
    )
    for own, other in zip(gradients(model, loss), whole, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-13)


def test_weights_depend_on_the_loss_reduction() -> None:
    assert loss_weights([3, 1]) == [0.75, 0.25]
    assert loss_weights([3, 1], "sum") == [1.0, 1.0]
    with pytest.raises(PipelineError, match="unknown loss reduction 'none'; there are 'mean' and 'sum'"):
        loss_weights([3, 1], "none")


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (torch.zeros(3), "3 samples cannot make 4 micro-batches"),
        (torch.zeros(0, 2), "0 samples cannot make 4"),
        (torch.tensor(1.0), "batch has no dimension to cut"),
        ((torch.zeros(8), torch.zeros(9)), r"batch\[0\] has 8, batch\[1\] has 9"),
        ({"x": torch.zeros(8), "n": 8}, r"batch\['n'\] is int; a batch is tensors"),
        ([torch.zeros(8), None], r"batch\[1\] is NoneType"),
        ((), "no tensor"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: object, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        split_batch(batch, 4)


def test_zero_micro_batches_are_refused() -> None:
    with pytest.raises(PipelineError, match="at least 1, not 0"):
        split_batch(torch.zeros(4), 0)


@pytest.mark.parametrize(("samples", "microbatches", "every"), [(8, 8, 1), (10, 4, 2), (7, 5, 3), (2, 2, 3)])
def test_replicas_share_the_micro_batches_of_a_batch(samples: int, microbatches: int, every: int) -> None:
    batch = (torch.arange(samples), {"y": torch.arange(samples) + 100})
    found = {}
    for first in range(every):
        own = share_of_replica(batch, microbatches, first, every)
        for number, (begin, end) in microbatch_bounds(samples, microbatches, first, every).items():
            found[number] = part(own, begin, end)
    assert sorted(found) == list(range(microbatches))
    for number, (x, more) in enumerate(split_batch(batch, microbatches)):
        assert torch.equal(found[number][0], x) and torch.equal(found[number][1]["y"], more["y"])


def test_a_change_of_one_part_does_not_affect_the_graph_of_another() -> None:
    batch = torch.ones(4, 2, requires_grad=True)
    first, second = part(batch, 0, 2), part(batch, 2, 4)
    assert first.requires_grad and first.is_leaf and first.data_ptr() == batch.data_ptr()
    saved = (first * first).sum()
    with torch.no_grad():
        second.mul_(2)  # must not change the tensors that the other graph has saved
    saved.backward()
    assert first.grad is not None and second.grad is None and batch.grad is None
