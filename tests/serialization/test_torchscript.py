"""TorchScript functions and modules: sent by name, by value, in containers, and sent on."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from rpcbench.base.errors import SerializationError
from rpcbench.serialization import closures
from rpcbench.serialization.closures import MissingCodeError
from rpcbench.serialization.pickler import Codec

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]*` is deprecated")

SOURCE = """
import torch

def plus_one(y: torch.Tensor) -> torch.Tensor:
    return y + 1

def scaled(x: torch.Tensor, by: int = 2, shift: float = 0.5) -> torch.Tensor:
    if bool(x.sum() > 100):
        return plus_one(x)
    return x * by + shift
"""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        return self.inner(x) * (2 if twice else 1)


def send(value: Any) -> Any:
    return Codec().decode_value(Codec().encode_value(value)[0])


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that is imported as `scripted_functions`, with Python functions to script."""
    path = tmp_path / "scripted_functions.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("scripted_functions", path)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scripted_functions", made)
    spec.loader.exec_module(made)
    linecache.checkcache()
    return made


@pytest.fixture
def function(module: types.ModuleType) -> Any:
    """A script function that is in no module."""
    return torch.jit.script(module.scaled)


def test_a_script_function_by_value_computes_equal_results(function: Any) -> None:
    arrived = send({"f": [function]})["f"][0]
    x = torch.ones(2)
    for args, kwargs in [((x,), {}), ((x, 3), {}), ((x,), {"by": 4}), ((), {"shift": 1.0, "x": x}), ((x * 99,), {})]:
        assert torch.equal(arrived(*args, **kwargs), function(*args, **kwargs))
    with pytest.raises(RuntimeError, match="missing value for argument 'x'"):
        arrived()


def test_a_traced_function_can_be_sent() -> None:
    assert send(torch.jit.trace(lambda x: x * 3, torch.ones(1)))(torch.ones(1)).item() == 3


def test_a_received_function_can_be_sent_on_and_is_loaded_once(function: Any) -> None:
    closures._load_function.cache_clear()
    first = send(function)
    onward = send([first, function])
    assert [f(torch.ones(1), by=3).item() for f in onward] == [3.5, 3.5]
    assert first.__name__ == "scaled"
    assert closures._load_function.cache_info().misses == 1


def test_a_script_function_of_a_module_is_sent_by_name(module: types.ModuleType) -> None:
    module.scaled = torch.jit.script(module.scaled)
    body = Codec().encode_value(module.scaled)[0]
    assert Codec().decode_value(body) is module.scaled
    del module.scaled
    with pytest.raises(MissingCodeError, match=r"'scaled'.*RPC pickler does not serialize"):
        Codec().decode_value(body)


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2))])
def test_script_modules_arrive_complete_and_as_separate_copies(make: Any) -> None:
    net = make(Net())
    one, two = send(net), send({"deep": [net]})["deep"][0]
    assert isinstance(one, torch.jit.ScriptModule)
    assert torch.equal(one(torch.ones(2)), net(torch.ones(2)))
    one.inner.weight.data.zero_()
    assert not torch.equal(two.inner.weight, one.inner.weight) and torch.equal(two.inner.weight, net.inner.weight)


def test_a_script_module_keeps_its_defaults_and_requires_grad() -> None:
    arrived = send(torch.jit.script(Net()))
    assert torch.equal(arrived(torch.ones(2), twice=True), arrived(torch.ones(2)) * 2)
    assert all(parameter.requires_grad for parameter in arrived.parameters())


def test_a_script_module_inside_a_plain_module_can_be_sent() -> None:
    model = torch.nn.Sequential(torch.jit.script(Net()), torch.nn.ReLU())
    arrived = send(model)
    assert torch.equal(arrived(torch.ones(2)), model(torch.ones(2)))


def test_a_bound_method_of_a_script_module_is_sent_with_its_module() -> None:
    net = torch.jit.script(Net())
    assert torch.equal(send(net.__call__)(torch.ones(2)), net(torch.ones(2)))


def test_the_files_of_large_modules_are_not_copied_into_the_payload() -> None:
    body = Codec().encode_value(torch.jit.script(torch.nn.Linear(100, 100)))[0]
    assert len(body.payload) < 1000 and sum(buffer.nbytes for buffer in body.buffers) > 40_000


def test_a_script_module_on_several_devices_is_refused() -> None:
    net = torch.jit.script(Net())
    net.inner.bias = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(SerializationError, match=r"^value: a script module with tensors on cpu, meta cannot be sent"):
        send(net)
