"""Names in calls, RRefs and distributed backward, over three workers; a process without names refuses them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcbench import autograd, named
from rpcbench.base.errors import RemoteError
from rpcbench.named import NamedTensor, NamesError
from rpcbench.optim import DistributedOptimizer
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.serialization.closures import MissingCodeError
from rpcbench.serialization.pickler import Codec


def x(**options: Any) -> NamedTensor:
    return named.rand(3, 4, names=("N", "C"), dtype=torch.double, **options)


def told(value: Any) -> Any:
    """Return the class and the names of a value, as strings."""
    return [type(value).__name__, *(value.names if isinstance(value, NamedTensor) else ())]


def through(value: Tensor, *way: str) -> Tensor:
    """Double `value` here and on each worker of the way, and return the result."""
    return rpc_sync(way[0], through, (value * 2, *way[1:])) if way else value * 2


class Layer:
    """Holds a named weight."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(named.ones(4, names=("C",), dtype=torch.double))

    def forward(self, value: NamedTensor) -> Tensor:
        return value * self.weight

    def gradient(self, context: int) -> list[Any]:
        gradient = autograd.get_gradients(context)[self.weight]
        return [*told(gradient), gradient.rename(None).tolist()]

    def parameters(self) -> list[RRef[nn.Parameter]]:
        return [RRef(self.weight)]

    def shown(self) -> list[Any]:
        return [*told(self.weight), isinstance(self.weight, nn.Parameter), self.weight.rename(None).tolist()]


@pytest.mark.parametrize(
    "value",
    [x(), x(requires_grad=True), x().align_to("C", "N"), x().sum()],
    ids=["plain", "with gradient", "aligned", "scalar"],
)
def test_a_named_tensor_is_equal_after_encoding_and_decoding(value: NamedTensor) -> None:
    made = Codec().decode_value(Codec().encode_value({"a": [value, value], "plain": torch.ones(2)})[0])
    found = made["a"][0]
    assert found is made["a"][1]
    assert (type(found), found.names, found.requires_grad) == (NamedTensor, value.names, value.requires_grad)
    assert (found.is_leaf, torch.equal(found, value)) == (True, True)
    assert type(made["plain"]) is Tensor


def test_decoded_views_of_one_memory_keep_their_own_names() -> None:
    whole = x()
    first, second = Codec().decode_value(Codec().encode_value([whole, whole.rename("A", "B").t()])[0])
    assert (first.names, second.names) == (("N", "C"), ("B", "A"))
    first.zero_()
    assert float(second.sum()) == 0


def test_a_process_without_named_tensors_refuses_to_decode_them(monkeypatch: pytest.MonkeyPatch) -> None:
    body, _ = Codec().encode_value(x())
    monkeypatch.setitem(sys.modules, "rpcbench.named.named_tensor", None)
    with pytest.raises(MissingCodeError, match="rpcbench"):
        Codec().decode_value(body)


def test_arguments_and_results_of_calls_keep_names(agents: list[Agent]) -> None:
    assert rpc_sync("worker1", told, (x(),)) == ["NamedTensor", "N", "C"]
    assert rpc_sync("worker1", told, (x().rename(None),)) == ["Tensor"]
    assert rpc_sync("worker1", through, ([x()][0],)).names == ("N", "C")
    assert rpc_sync("worker1", dict, ({"a": (x(),)},))["a"][0].names == ("N", "C")


def test_remote_operators_of_torch_follow_the_rules_of_names(agents: list[Agent]) -> None:
    value = x()
    result = rpc_sync("worker1", torch.add, (value, value))
    assert (result.names, torch.equal(result, value + value)) == (("N", "C"), True)
    assert rpc_sync("worker1", named.sum, (value, "N")).names == ("C",)
    with pytest.raises((NamesError, RemoteError), match=r"add of \(N=3, C=4\) and \(N=3\)"):
        rpc_sync("worker1", torch.add, (value, value.sum("C")))


def test_values_of_rrefs_keep_names(agents: list[Agent]) -> None:
    held = remote("worker1", through, (x(), "worker2"))
    assert held.to_here().names == ("N", "C")
    assert rpc_sync("worker2", _names_of_rref, (held,)) == ("N", "C")
    assert held.rpc_sync().sum("C").names == ("N",)
    held.to_here()


def _names_of_rref(held: RRef[NamedTensor]) -> Any:
    return held.to_here().names


def test_a_backward_through_three_workers_keeps_names(agents: list[Agent]) -> None:
    value = x(requires_grad=True)
    with autograd.context() as context:
        result = rpc_sync("worker1", through, (value, "worker2", "notebook"))
        assert (type(result), result.names) == (NamedTensor, ("N", "C"))
        assert torch.equal(result, value * 8)
        autograd.backward(context, [result.sum()])
        gradient = autograd.get_gradients(context)[value]
        assert gradient.names == ("N", "C")
        assert torch.equal(gradient.rename(None), torch.full((3, 4), 8.0, dtype=torch.double))
    assert value.grad is None


def test_a_remote_named_parameter_has_named_gradients_and_is_trained(agents: list[Agent]) -> None:
    layer = remote("worker1", Layer)
    [weight] = layer.rpc_sync().parameters()
    optimizer = DistributedOptimizer(torch.optim.Adam, [weight], lr=0.5)
    with autograd.context() as context:
        result = layer.rpc_sync().forward(named.ones(3, 4, names=("N", "C"), dtype=torch.double))
        assert result.names == ("N", "C")
        autograd.backward(context, [result.sum()])
        assert layer.rpc_sync().gradient(context) == ["NamedTensor", "C", [3.0] * 4]
        optimizer.step(context)
    kind, name, parameter, values = layer.rpc_sync().shown()
    assert (kind, name, parameter) == ("NamedTensor", "C", True)
    assert values == pytest.approx([0.5] * 4)
    with pytest.raises((NamesError, RemoteError), match="'C'"):
        layer.rpc_sync().forward(named.ones(3, 4, names=("C", "N"), dtype=torch.double))


def test_the_encoding_of_a_plain_tensor_does_not_mention_names() -> None:
    plain = torch.rand(3, 4)
    body, _ = Codec().encode_value(plain)
    assert b"named" not in body.payload
    assert type(Codec().decode_value(body)) is Tensor


def test_the_module_of_names_is_not_imported_without_use() -> None:
    script = (
        "import sys, torch, rpcbench.rpc, rpcbench.autograd, rpcbench.optim, rpcbench.pipeline\n"
        "from rpcbench.autograd.gradients import LeafGradients\n"
        "held, leaf = LeafGradients(), torch.nn.Parameter(torch.ones(2))\n"
        "held.add_gradients([(leaf, torch.ones(2))])\n"
        "assert type(held.copy_with_names()[leaf]) is torch.Tensor\n"
        "assert not [name for name in sys.modules if name.startswith('rpcbench.named')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
