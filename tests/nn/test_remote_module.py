"""`RemoteModule`: a module on another worker, used like a local one."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn

from rpcbench import autograd
from rpcbench.base.errors import SerializationError
from rpcbench.nn import RemoteModule
from rpcbench.optim import DistributedOptimizer
from rpcbench.rpc import RRef, get_worker_info, rpc_sync
from rpcbench.runtime.agent import Agent


class Scale(nn.Module):
    """Returns the name of its worker with its result; has a submodule and a buffer."""

    def __init__(self, factor: float = 2.0, *, bias: float = 0.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.double))
        self.inner = nn.Linear(1, 1)
        self.register_buffer("bias", torch.tensor(bias, dtype=torch.double))

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> tuple[str, torch.Tensor]:
        assert isinstance(self.bias, torch.Tensor)
        y = x * self.factor + self.bias
        return get_worker_info().name, y * 2 if twice else y


def one() -> torch.Tensor:
    return torch.ones(3, dtype=torch.double)


def run(module: RemoteModule, x: torch.Tensor) -> tuple[str, torch.Tensor]:
    return module(x)


def is_training(rref: RRef[nn.Module]) -> bool:
    return rref.local_value().training


@pytest.mark.parametrize("where", ["worker1", "worker1/cpu", "rank:1", "rank:1/cpu"])
def test_a_remote_module_runs_on_the_worker_where_it_was_made(agents: list[Agent], where: str) -> None:
    module = RemoteModule(where, Scale, (3.0,), {"bias": 1.0})
    assert module.on in ("worker1", 1) and module.device == "cpu" and not module.is_device_map_set
    name, y = module(one())
    assert name == "worker1" and y.tolist() == [4, 4, 4]
    assert module.forward(one(), twice=True)[1].tolist() == [8, 8, 8]
    assert module.forward_async(one()).wait()[0] == "worker1"


def test_a_class_that_is_local_to_a_function_can_be_used(agents: list[Agent]) -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    assert RemoteModule("worker1", Mine)(one()).tolist() == [2, 2, 2]


def test_parameters_of_a_remote_module_can_be_trained(agents: list[Agent]) -> None:
    module, beside = RemoteModule("worker1", Scale), Scale()
    parameters = module.remote_parameters()
    assert [rref.owner_name() for rref in parameters] == ["worker1"] * 3
    assert len(module.remote_parameters(recurse=False)) == 1
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(one())[1].square().sum()])
        optimizer.step(context_id)
    (one() * beside.factor).square().sum().backward()
    torch.optim.SGD(beside.parameters(), lr=0.1).step()
    torch.testing.assert_close(parameters[0].to_here(), beside.factor, rtol=0, atol=1e-12)


def test_train_and_eval_set_the_mode_of_the_remote_module(agents: list[Agent]) -> None:
    module = RemoteModule("worker1", Scale)
    for mode in (True, False):
        assert module.train(mode) is module and module.training is mode
        assert rpc_sync("worker1", is_training, (module.get_module_rref(),)) is mode
    module.train()
    assert module.eval() is module
    assert rpc_sync("worker1", is_training, (module.module_rref,)) is False


def test_a_remote_module_can_be_passed_to_another_worker(agents: list[Agent]) -> None:
    module = RemoteModule("worker1", Scale).eval()
    module.note = "not sent"
    name, y = rpc_sync("worker2", run, (module, one()))
    assert name == "worker1" and y.tolist() == [2, 2, 2]
    assert rpc_sync("worker2", attributes, (module,)) == ("worker1", "cpu", False, False)
    same = rpc_sync("worker2", RemoteModule.init_from_module_rref, ("worker1", module.get_module_rref()))
    assert same(one())[0] == "worker1"


def attributes(module: RemoteModule) -> Any:
    return module.on, module.device, module.training, hasattr(module, "note")


def test_a_remote_module_moves_with_its_parameters_and_its_mode(agents: list[Agent]) -> None:
    module = RemoteModule("worker1", Scale, (5.0,)).eval()
    assert module.to("worker2") is module
    name, y = module(one())
    assert name == "worker2" and y.tolist() == [5, 5, 5]
    assert [rref.owner_name() for rref in module.remote_parameters()] == ["worker2"] * 3
    assert rpc_sync("worker2", is_training, (module.module_rref,)) is False


@pytest.mark.parametrize("place", ["cpu", "cuda:0", torch.device("cpu"), torch.float64, "nobody"])
def test_a_move_to_a_place_that_is_no_worker_is_refused(agents: list[Agent], place: Any) -> None:
    with pytest.raises(ValueError, match="Method ``to`` not supported for RemoteModule"):
        RemoteModule("worker1", Scale).to(place)


def test_a_function_that_returns_no_module_is_refused(agents: list[Agent]) -> None:
    with pytest.raises(ValueError, match=r"an instance of <class nn.Module>, but it returns .*int"):
        RemoteModule("worker1", int)(one())  # type: ignore[arg-type]


def test_a_module_in_place_of_its_class_is_refused(agents: list[Agent]) -> None:
    with pytest.raises(TypeError, match=r"as the class Scale does; .*init_from_module_rref"):
        RemoteModule("worker1", Scale())


class Locking(nn.Module):
    """Cannot be sent, and takes an argument that cannot be sent."""

    def __init__(self, lock: Any = None) -> None:
        super().__init__()
        self.lock = lock or threading.Lock()


def test_a_module_or_argument_that_cannot_be_sent_is_named_with_advice(agents: list[Agent]) -> None:
    with pytest.raises(SerializationError, match=r"the module on worker1 .*cannot pickle '_thread.lock'.* __init__"):
        RemoteModule("worker1", Locking, (threading.Lock(),))
    module = RemoteModule("worker1", Locking)
    with pytest.raises(SerializationError, match=r"move to worker2 cannot be sent: result.lock: .*__getstate__"):
        module.to("worker2")
    assert module.on == "worker1" and module.remote_parameters() == []


@pytest.mark.parametrize("place", ["/", "/cuda:0", "worker1/cpu/cpu", "rank:x"])
def test_a_remote_device_that_cannot_be_parsed_is_refused(agents: list[Agent], place: str) -> None:
    with pytest.raises(ValueError, match=r"Could not parse remote_device: .*The valid format is"):
        RemoteModule(place, Scale)


def test_a_device_that_does_not_exist_is_refused(agents: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="cpu2"):
        RemoteModule("worker1/cpu2", Scale)
    with pytest.raises(ValueError, match="cpu2"):
        RemoteModule("worker1", Scale).to("worker2/cpu2")


def test_methods_that_would_act_on_the_local_object_are_refused(agents: list[Agent]) -> None:
    module = RemoteModule("worker1", Scale)
    with pytest.raises(ValueError, match=r"Method ``parameters`` not supported .*use ``remote_parameters`` instead"):
        module.parameters()
    for name in ("state_dict", "cuda", "register_forward_hook", "named_parameters", "zero_grad", "extra_repr"):
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)(1, a=2)
    assert repr(module).startswith("RemoteModule(on worker1/cpu, UserRRef")


def test_a_remote_module_can_be_pickled_only_in_calls(agents: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        pickle.dumps(RemoteModule("worker1", Scale))
