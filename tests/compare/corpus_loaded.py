"""What a model and its step begin with: weights under another name or transposed, a scale that is left in."""

from __future__ import annotations

from parts import NET, make_net, net_on_each, rows_of, share, step_by_hand
from program import Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

SCALE = 64.0


def swapped_on_each(mesh: DeviceMesh) -> nn.Module:
    """A checkpoint whose layers are numbered from the other end."""
    model, loaded = make_net(), make_net()
    for own, other in zip(model.blocks, reversed(loaded.blocks), strict=True):
        own.load_state_dict(other.state_dict())
    return model


def transposed_on_each(mesh: DeviceMesh) -> nn.Module:
    """A checkpoint of a library that has its weights the other way round."""
    model = make_net()
    model.enter.weight.data = model.enter.weight.data.T.contiguous()
    return model


def step_scaled(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The loss is scaled for a type with few digits, and the gradients are not scaled back."""
    handles = [each.register_hook(lambda gradient: gradient * SCALE) for each in model.parameters()]
    loss = step_by_hand(model, mesh)
    for handle in handles:
        handle.remove()
    return loss


def step_summed(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The loss of a rank is the sum over its rows; what it shows is not divided."""
    loss = step_by_hand(model, mesh)
    return loss * len(share(rows_of()[0], mesh))


DP2 = {"dp": 2}
RIGHT = net_on_each, step_by_hand
BLOCKS = tuple(f"blocks.{n}.{name}" for n in range(2) for name, _ in make_net().blocks[0].named_parameters())

PROGRAMS = [
    Program(
        "blocks_swapped", NET, RIGHT, (swapped_on_each, step_by_hand), DP2, "initial", BLOCKS,
        r"the values of blocks\.1",
    ),
    Program(
        "weight_transposed", NET, RIGHT, (transposed_on_each, step_by_hand), DP2, "initial", ("enter.weight",),
        "transposed",
    ),
    Program(
        "scale_of_loss_left_in", NET, RIGHT, (net_on_each, step_scaled), DP2, "gradient",
        tuple(name for name, _ in make_net().named_parameters()), r"64 times.*scale of the loss",
    ),
    Program(
        "loss_of_rows_summed", NET, RIGHT, (net_on_each, step_summed), DP2, "loss", ("",),
        "exactly 4 times too large",
    ),
]  # fmt: skip
