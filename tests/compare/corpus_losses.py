"""Losses that are computed with other options than in one process, or with another number of terms."""

from __future__ import annotations

from typing import Any

import torch
from parts import (
    LABELS,
    WIDTH,
    Feed,
    Net,
    average_gradients,
    make_net,
    net_on_each,
    rows_of,
    seeded,
    share,
    sum_plainly,
)
from program import Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

SMOOTHED: dict[str, Any] = {"label_smoothing": 0.1}
PADDED: dict[str, Any] = {"ignore_index": 4}
WEIGHTED: dict[str, Any] = {"weight": torch.arange(1.0, LABELS + 1), "reduction": "sum"}
SUMMED: dict[str, Any] = {"reduction": "sum"}


# -- options of cross entropy
def step_with(model: nn.Module, x: Tensor, y: Tensor, options: dict[str, Any], divisor: float = 1.0) -> Tensor:
    loss = functional.cross_entropy(model(x) / divisor, y, **options)
    loss.backward()
    return loss.detach()


def step_share_with(model: nn.Module, mesh: DeviceMesh, options: dict[str, Any], divisor: float = 1.0) -> Tensor:
    loss = step_with(model, *(share(each, mesh) for each in rows_of()), options, divisor)
    average_gradients(model, mesh.get_group())
    return loss


def step_smoothed(model: nn.Module) -> Tensor:
    return step_with(model, *rows_of(), SMOOTHED)


def step_smoothed_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_share_with(model, mesh, SMOOTHED)


def step_without_options(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_share_with(model, mesh, {})


def step_with_padding(model: nn.Module) -> Tensor:
    return step_with(model, *rows_of(), PADDED)


def step_with_padding_on_ranks(model: nn.Module, mesh: DeviceMesh, options: dict[str, Any] = PADDED) -> Tensor:
    """Ranks have all rows."""
    return step_with(model, *rows_of(), options)


def step_over_padding(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The collate function of the ranks has another number for padding."""
    return step_with_padding_on_ranks(model, mesh, {})


def step_weighted(model: nn.Module) -> Tensor:
    return step_with(model, *rows_of(), WEIGHTED)


def sum_over_shares(model: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> Tensor:
    loss = step_with(model, *(share(each, mesh) for each in rows_of()), options)
    for each in model.parameters():
        each.grad = sum_plainly(each.grad, mesh.get_group())
    return loss


def step_weighted_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return sum_over_shares(model, mesh, WEIGHTED)


def step_without_weights(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return sum_over_shares(model, mesh, SUMMED)


TEMPERATURE = 0.5


def step_at_temperature(model: nn.Module) -> Tensor:
    return step_with(model, *rows_of(), {}, TEMPERATURE)


def step_at_temperature_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_share_with(model, mesh, {}, TEMPERATURE)


# -- a loss that is a module
class ScoredNet(Net):
    """Its forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(super().forward(x), y)


def make_scored() -> ScoredNet:
    return seeded(ScoredNet)


def scored_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_scored()


def scored_with_default(mesh: DeviceMesh) -> nn.Module:
    model = make_scored()
    model.criterion = nn.CrossEntropyLoss()
    return model


def step_scored(model: nn.Module) -> Tensor:
    loss = model(*rows_of())
    loss.backward()
    return loss.detach()


def step_scored_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = model(*(share(each, mesh) for each in rows_of()))
    loss.backward()
    average_gradients(model, mesh.get_group())
    return loss.detach()


# -- a term for a balanced load of experts
BALANCE = 0.1


class RoutedNet(nn.Module):
    """Each row is the mean of two experts, by the probabilities of a router. Returns scores, and a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Feed() for _ in range(2))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(-1)
        mixed = sum(chances[:, n, None] * expert(x) for n, expert in enumerate(self.experts))
        return self.head(mixed), chances.square().sum(-1).mean()


def make_routed() -> RoutedNet:
    return seeded(RoutedNet)


def routed_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_routed()


def step_balanced(model: nn.Module, factor: float = BALANCE) -> Tensor:
    x, y = rows_of()
    scores, term = model(x)
    loss = functional.cross_entropy(scores, y) + factor * term
    loss.backward()
    return loss.detach()


def step_balanced_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_balanced(model)


def step_unbalanced(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The loop of the ranks does not know of a second output."""
    return step_balanced(model, 0.0)


def step_balanced_by_each(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank adds the term, and terms are summed up."""
    return step_balanced(model, BALANCE * mesh.size())


DP2, TP2 = {"dp": 2}, {"tp": 2}
ROUTED, ON_ALL_ROWS = (make_routed, step_balanced), (routed_on_each, step_balanced_on_ranks)
LOSS = ("loss", ("", "head"))

PROGRAMS = [
    Program(
        "label_smoothing_left_out", (make_net, step_smoothed), (net_on_each, step_smoothed_on_ranks),
        (net_on_each, step_without_options), DP2, *LOSS, r"label smoothing of 0, the reference one of 0\.1",
    ),
    Program(
        "padding_not_ignored", (make_net, step_with_padding), (net_on_each, step_with_padding_on_ranks),
        (net_on_each, step_over_padding), TP2, *LOSS, "rows 1 and 2 count on the ranks.*ignore_index",
    ),
    Program(
        "class_weights_left_out", (make_net, step_weighted), (net_on_each, step_weighted_on_ranks),
        (net_on_each, step_without_weights), DP2, *LOSS, "the classes other weights",
    ),
    Program(
        "temperature_left_out", (make_net, step_at_temperature), (net_on_each, step_at_temperature_on_ranks),
        (net_on_each, step_without_options), DP2, *LOSS, r"temperature of 1, the reference one of 0\.5",
    ),
    Program(
        "criterion_of_other_option", (make_scored, step_scored), (scored_on_each, step_scored_on_ranks),
        (scored_with_default, step_scored_on_ranks), DP2, "forward", ("criterion",), r"label_smoothing is 0\.0",
    ),
    Program(
        "balance_left_out", ROUTED, ON_ALL_ROWS, (routed_on_each, step_unbalanced), TP2, *LOSS,
        r"a term .*left out.*-0\.1 times the model\[1\]",
    ),
    Program(
        "balance_by_each_rank", ROUTED, ON_ALL_ROWS, (routed_on_each, step_balanced_by_each), TP2, *LOSS,
        r"a term .*counted otherwise.* 0\.1 times the model\[1\]",
    ),
]  # fmt: skip
