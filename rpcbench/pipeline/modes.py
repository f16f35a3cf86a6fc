"""What a stage's modules were told by whoever made them, and a pipeline has to heed: modes, and what changes in place.

Guarantees: what came in evaluation mode, as a batch norm that is frozen, stays so while the stage trains.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import filterfalse
from operator import attrgetter

from torch import nn

from rpcbench.pipeline.recipe import Recipe

_training = attrgetter("training")
_RESTS = (
    "the model is in evaluation mode, and its stages train so: dropout drops nothing, and batch norms use the "
    "statistics they have. Call model.train() before split() if that is not what you want"
)


class Modes:
    """The layers of one worker's stages."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        layers = [layer for module in self._modules for layer in module.modules()]
        self._trained, self._resting = [*filter(_training, layers)], [*filterfalse(_training, layers)]

    def set(self, training: bool) -> None:
        """All layers are in training mode, but for those that came in evaluation mode; or all in evaluation mode."""
        if {*map(_training, self._trained)} - {training}:
            for module in self._modules:
                module.train(training)
            for layer in self._resting:
                layer.training = False


def warn_of_rest(modules: Iterable[nn.Module]) -> None:
    """UserWarning, at the line that makes the pipeline, where none of the model's modules is in training mode."""
    if not any(layer.training for module in modules for layer in module.modules()):
        warnings.warn(_RESTS, UserWarning, stacklevel=3)


def changes_in_place(module: nn.Module) -> bool:
    """Whether it may change what it is given, as a ReLU(inplace=True) does; not all that may can be told."""
    return any(
        getattr(layer, "inplace", False) is True or (isinstance(layer, Recipe) and layer.changes_in_place)
        for layer in module.modules()
    )
