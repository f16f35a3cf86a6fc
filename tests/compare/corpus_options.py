"""Options of modules that are others on the ranks, and the type of all parameters."""

from __future__ import annotations

import torch
from corpus_ranks import drop_on_each, make_drop, step_drop, step_drop_of_own_seed
from parts import (
    LABELS,
    NET,
    PARAMETERS,
    WIDTH,
    average_gradients,
    loss_of,
    make_net,
    net_on_each,
    optimizer_of,
    rows_of,
    seeded,
    share,
    step_by_hand,
    step_net,
    step_net_on_ranks,
)
from program import Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


# -- a norm of the batch; each rank has all rows
class BatchFeed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, LABELS)
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.batch_norm(self.enter(x)))


def make_batch_feed() -> BatchFeed:
    return seeded(BatchFeed)


def batch_feed_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_batch_feed()


def batch_feed_of_other_momentum(mesh: DeviceMesh) -> nn.Module:
    model = make_batch_feed()
    model.batch_norm.momentum = 0.01
    return model


def batch_feed_in_eval(mesh: DeviceMesh) -> nn.Module:
    """An evaluation has left it so."""
    return make_batch_feed().eval()


# -- dropout


def make_drop_for_eval() -> nn.Module:
    return make_drop().eval()


def drop_of_other_rate(mesh: DeviceMesh) -> nn.Module:
    model = make_drop()
    model.dropout.p = 0.1
    return model


def drop_in_eval(mesh: DeviceMesh) -> nn.Module:
    return make_drop().eval()


# -- an optimizer that is made anew
def step_with_state(model: nn.Module) -> Tensor:
    optimizer = optimizer_of(model, torch.optim.Adam, lr=0.01)
    optimizer.zero_grad()
    loss = step_net(model)
    optimizer.step()
    return loss


def step_with_state_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_with_state(model)


def step_without_state(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The optimizer is made in the loop."""
    model.__dict__.pop("optimizer", None)
    return step_with_state(model)


# -- all of it in another type
def half_net_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_net().bfloat16()


def step_half_net(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = (share(each, mesh) for each in rows_of())
    loss = loss_of(model(x.bfloat16()).float(), y)
    loss.backward()
    average_gradients(model, mesh.get_group())
    return loss.detach()


DP2, TP2 = {"dp": 2}, {"tp": 2}
BATCH, ON_ALL_ROWS = (make_batch_feed, step_net), (batch_feed_on_each, step_net_on_ranks)
DROP, DROP_ON_ROWS = (make_drop, step_drop), (drop_on_each, step_drop_of_own_seed)

PROGRAMS = [
    Program(
        "momentum_of_batch_norm", BATCH, ON_ALL_ROWS, (batch_feed_of_other_momentum, step_net_on_ranks), TP2, "step",
        ("batch_norm.running_mean",), r"momentum is 0\.01",
    ),
    Program(
        "batch_norm_in_eval", BATCH, ON_ALL_ROWS, (batch_feed_in_eval, step_net_on_ranks), TP2, "forward",
        ("batch_norm",), "training is False",
    ),
    Program(
        "dropout_of_other_rate", DROP, DROP_ON_ROWS, (drop_of_other_rate, step_drop_of_own_seed), DP2, "forward",
        ("dropout",), r"0\.1 on ranks 0 and 1, 0\.5 in the reference",
    ),
    Program(
        "dropout_in_eval", DROP, DROP_ON_ROWS, (drop_in_eval, step_drop_of_own_seed), DP2, "forward", ("dropout",),
        "none at all on ranks 0 and 1",
    ),
    Program(
        "dropout_in_train", (make_drop_for_eval, step_drop), (drop_in_eval, step_drop_of_own_seed), DROP_ON_ROWS, DP2,
        "forward", ("dropout",), r"0\.5 on ranks 0 and 1, none at all in the reference",
    ),
    Program(
        "optimizer_made_in_each_step", (make_net, step_with_state), (net_on_each, step_with_state_on_ranks),
        (net_on_each, step_without_state), TP2, "step", PARAMETERS, "lost its state: exp_avg", steps=2,
    ),
    Program(
        "model_in_bfloat16", NET, (net_on_each, step_by_hand), (half_net_on_each, step_half_net), DP2, "initial",
        PARAMETERS, "parameters in bfloat16, and the reference in float32",
    ),
]  # fmt: skip
