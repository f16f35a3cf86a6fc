"""Tables, panels and reprs of RRefs show a named tensor as `Tensor (N=3, C=4)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from worlds import until

from rpcbench import autograd, named
from rpcbench.named import name_parameters
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import size_of, type_of

SHOWN = "Tensor (N=3, C=4)"


def made() -> Any:
    return named.zeros(3, 4, names=("N", "C"))


def here(held: RRef[Any]) -> str:
    return repr(held)


def passed_on(held: RRef[Any], to: str) -> Any:
    return rpc_sync(to, here, (held,))


@pytest.mark.parametrize(
    ("value", "type_", "size"),
    [
        (made(), SHOWN, 48),
        (made().rename("N", None), "Tensor (N=3, 4)", 48),
        (name_parameters(nn.Linear(3, 8), weight=("H", "C")).weight, "Parameter (H=8, C=3)", 96),
        (name_parameters(nn.Linear(3, 8), weight=("H", "C")), "Linear", 128),
        (torch.zeros(3), "Tensor", 12),
        ([made()], "list", 48),
    ],
    ids=["tensor", "in part", "parameter", "layer", "plain", "list"],
)
def test_the_type_of_a_named_tensor_is_shown_with_names_and_sizes(value: Any, type_: str, size: int) -> None:
    assert (type_of(value), size_of(value)) == (type_, size)


def test_the_table_of_owned_values_shows_names(agents: list[Agent]) -> None:
    there = remote("worker1", made)
    holds = remote("worker2", list, ([RRef(made())],))

    def types() -> list[str]:
        return sorted(row["type"] for agent in agents for row in agent.tables()["owned"].values())

    until(lambda: types() == [SHOWN, SHOWN, "list"])
    del there, holds


def test_the_table_of_graphs_shows_names(agents: list[Agent]) -> None:
    value = made().requires_grad_()
    plain = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [(value + plain).sum()])
        (row,) = agents[0].tables()["graphs"].values()
        assert sorted(leaf["shape"] for leaf in row["leaves"]) == ["[4]", "[N=3, C=4]"]


def test_the_repr_of_an_rref_shows_names(agents: list[Agent]) -> None:
    given = RRef(made())
    assert repr(given).startswith("OwnerRRef(GloballyUniqueId(") and repr(given).endswith(f", {SHOWN})")
    assert rpc_sync("worker1", passed_on, (given, "worker2")).endswith(f"), {SHOWN})")
    assert rpc_sync("worker1", passed_on, (given, "notebook")) == repr(given)
    given.local_value().rename_("A", "B")
    assert repr(given).endswith(", Tensor (A=3, B=4))")
    there = remote("worker1", made)
    there.to_here()
    assert rpc_sync("worker1", here, (there,)).endswith(f", {SHOWN})")
    assert "Tensor" not in repr(RRef(torch.zeros(2)))


def test_a_call_on_a_named_tensor_is_labelled_with_its_class(agents: list[Agent]) -> None:
    given = RRef(made())
    assert given._make_label(made, (given, "sum")) == "Tensor.sum"
