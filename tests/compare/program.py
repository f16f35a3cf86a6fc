"""A program of the corpus: one training step in one process, and the same step on several ranks, right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

PHASES = ("", "initial", "forward", "loss", "backward", "gradient", "step")

# Words of explanations that many programs share.
REDUCE = r"reduc|summand|add(s|ed)? up|partial|\bsum|averag|\bmean"
TIMES = r"times|factor|divid|scal|twice|double|\bsum|\bmean|too (large|small|great)"
DIFFER = r"differ|(not|un) ?equal|disagree|not the same|alone|other values|(one|some) ranks?\b|rank \d"

Alone = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]
OnRanks = tuple[Callable[[DeviceMesh], nn.Module], Callable[[nn.Module, DeviceMesh], Tensor]]


@dataclass(frozen=True)
class Program:
    """Each pair makes a model and takes a step with it: forward, backward, and for some an optimizer's step.

    Args:
        name: Unique in the corpus.
        reference: In one process.
        parallel: The right twin, called on each rank.
        wrong: Differs from the right twin in one place, as programs do in reality.
        mesh: The size of each dimension.
        phase: Of the first difference that a comparison of `wrong` with `reference` meets.
        places: Modules or parameters that are a right answer to where it is, without the names of wrappers.
        cause: A regular expression that a right explanation matches, in upper or lower case.
        steps: How often the step is taken.
    """

    name: str
    reference: Alone
    parallel: OnRanks
    wrong: OnRanks
    mesh: dict[str, int]
    phase: str = ""
    places: tuple[str, ...] = ()
    cause: str = ""
    steps: int = 1
