"""Leaves are reported with their names on their own worker, and the search for names runs no code of the user."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from rpcbench.autograd.graph_events import LeafNames, leaf_names


class Shy:
    """Raises if a property or a missing attribute is read."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(2))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    @property
    def model(self) -> Any:
        raise AssertionError("a property was asked for")


def test_leaves_are_named_after_variables_modules_and_shared_objects() -> None:
    w = torch.ones(3, requires_grad=True)
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1, bias=False)))
    stage: Any = nn.Sequential(nn.Linear(2, 2))
    server = Shy()
    found = leaf_names({"w": w, "net": model, "_": model, "number": 3}, [stage[0].bias, stage, server, w, 7])
    assert found == {
        id(w): "w",
        id(model[0].weight): "net.0.weight",
        id(model[0].bias): "net.0.bias",
        id(model[1][0].weight): "net.1.0.weight",
        id(stage[0].weight): "0.weight",
        id(stage[0].bias): "0.bias",
        id(server.weight): "weight",
    }


def test_each_leaf_is_searched_for_once_and_its_name_is_dropped_with_it() -> None:
    asked: list[int] = []

    stages: list[Any] = [nn.Linear(2, 2)]
    stray = torch.ones(1, requires_grad=True)

    def shared() -> list[Any]:
        asked.append(1)
        return stages

    known = LeafNames(shared)
    assert known.names_of([stages[0].weight, stray]) == ["weight", ""]
    assert known.names_of([stray, stages[0].weight]) == ["", "weight"]
    assert asked == [1]
    assert known.names_of([stages[0].bias]) == ["bias"]
    assert asked == [1, 1]
    del stray
    stages.clear()
    gc.collect()
    assert len(known._known) == 0
