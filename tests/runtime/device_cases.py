"""Device maps on a fake accelerator; `test_devices` runs these tests in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rpcbench.autograd as dist_autograd
from rpcbench.base.errors import SerializationError
from rpcbench.nn import RemoteModule
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current
from rpcbench.serialization.pickler import Codec
from rpcbench.serialization.tensor_types import Route
from rpcbench.serialization.tensors import INLINE
from tests import fake_device
from tests.worlds import config, mapped, nothing_left, until

fake_device.register()

CPU, ZERO, ONE = torch.device("cpu"), torch.device("fake:0"), torch.device("fake:1")
CROSSED = {"fake:0": "fake:1", "fake:1": "fake:0"}


def crossed(sent: Any) -> Any:
    codec = Codec()
    route = Route({ZERO: ONE, ONE: ZERO}, "No way.")
    return codec.decode_value(codec.encode_value(sent, route=route)[0])


def seen(tensor: torch.Tensor) -> list[Any]:
    return [tensor.device, tensor.tolist(), tensor.requires_grad, type(tensor)]


# -- the codec
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(2.5),
        lambda: torch.zeros(3, 0),
        lambda: torch.arange(6).reshape(2, 3).t(),
        lambda: torch.arange(float(INLINE)),
        lambda: torch.tensor([True, False]),
        lambda: torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["0-d", "empty", "transposed", "large", "bool", "wants gradients", "parameter"],
)
def test_a_tensor_arrives_equal_on_the_mapped_device(make: Any) -> None:
    here = make()
    sent = torch.nn.Parameter(here.to(ZERO)) if isinstance(here, torch.nn.Parameter) else here.detach().to(ZERO)
    sent.requires_grad_(here.requires_grad)
    arrived = crossed([sent])[0]
    assert seen(arrived) == [ONE, *seen(here)[1:]] and arrived.shape == here.shape
    assert arrived.stride() == here.stride() or not here.numel()


def test_repeated_dimensions_stay_repeated() -> None:
    arrived = crossed(torch.ones(1, device=ZERO).expand(5, 7))
    assert arrived.stride() == (0, 0) and arrived.device == ONE and arrived.sum().item() == 35


def test_views_on_a_device_share_memory_on_arrival() -> None:
    base = torch.arange(10**4, device=ZERO)
    whole, part, far = crossed([base, base[10:20], torch.ones(3, device=ONE)])
    whole.zero_()
    assert part.tolist() == [0] * 10 and [whole.device, part.device, far.device] == [ONE, ONE, ZERO]


def test_a_column_and_a_small_view_are_sent_without_the_rest() -> None:
    base = torch.arange(10**6, dtype=torch.float32).to(ZERO).reshape(1000, 1000)
    column, small = crossed([base[:, 3], base[500, :10]])
    assert column.tolist() == [1000.0 * i + 3 for i in range(1000)] and small.tolist()[:2] == [500000, 500001]
    assert column.untyped_storage().nbytes() == 4000 and small.untyped_storage().nbytes() <= 64


def test_a_tensor_without_a_route_is_named_with_its_path() -> None:
    with pytest.raises(SerializationError, match=r"^value\[1\]: a tensor on fake:0 has no route to its destination"):
        Codec().encode_value([1, torch.ones(1, device=ZERO)])
    with pytest.raises(SerializationError, match=r"^value\[0\]: a tensor on fake:1 has no route.*Nowhere"):
        Codec().encode_value([torch.zeros(0, device=ONE)], route=Route({ZERO: CPU}, "Nowhere."))


@pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]*` is deprecated")
def test_a_script_module_arrives_on_the_mapped_device() -> None:
    module = torch.jit.script(torch.nn.Linear(2, 2).to(ZERO))
    assert {p.device for p in crossed(module).parameters()} == {ONE}
    with pytest.raises(SerializationError, match=r"^value: a tensor on fake:0 has no route"):
        Codec().encode_value(module)


# -- calls
def doubled(tensor: torch.Tensor, where: str) -> torch.Tensor:
    assert str(tensor.device) == where, tensor.device
    return tensor * 2


def made(where: str) -> torch.Tensor:
    return torch.ones(3, device=where)


def test_arguments_follow_the_map_and_results_its_reverse(tmp_path: Path) -> None:
    with mapped(tmp_path, {"worker1": CROSSED, "worker2": {"fake:1": "cpu"}}, {"notebook": {"fake:0": "cpu"}}, {}) as (
        me,
        other,
        _,
    ):
        x = torch.arange(3.0)
        answer = me.call("worker1", doubled, (x.to(ZERO), "fake:1")).wait()
        assert seen(answer)[:2] == [ZERO, [0, 2, 4]]
        assert seen(me.call("worker1", doubled, (x.to(ONE), "fake:0")).wait())[:2] == [ONE, [0, 2, 4]]
        assert seen(me.call("worker1", doubled, (x, "cpu")).wait())[:2] == [CPU, [0, 2, 4]]
        assert seen(me.call("worker2", doubled, (x.to(ONE), "cpu")).wait())[0] == ONE  # also reversed for the result
        assert seen(other.call("notebook", doubled, (x.to(ZERO), "cpu")).wait())[0] == ZERO
        assert me.call("worker1", made, ("fake:1",)).wait().device == ZERO


def test_a_fetched_value_follows_the_map_of_the_fetching_member(tmp_path: Path) -> None:
    with mapped(tmp_path, {"worker1": {"fake:0": "fake:1"}}, {"notebook": {"fake:1": "fake:1"}}) as agents:
        rref = agents[0].create("worker1", made, ("fake:1",))
        assert agents[0].fetch(rref).wait().device == ZERO
        del rref
        nothing_left(agents)


def test_a_call_of_a_member_to_itself_follows_the_map(tmp_path: Path) -> None:
    with mapped(tmp_path, {"notebook": CROSSED}) as (me,):
        answer = me.call("notebook", doubled, (torch.ones(2, device=ZERO), "fake:1")).wait()
        assert seen(answer)[:2] == [ZERO, [2, 2]]


def test_a_map_can_contain_the_cpu(tmp_path: Path) -> None:
    with mapped(tmp_path, {"worker1": {"cpu": "fake:1"}}, {}) as (me, _):
        assert seen(me.call("worker1", doubled, (torch.ones(2), "fake:1")).wait())[:2] == [CPU, [2, 2]]


def test_a_missing_map_is_an_error_of_the_caller_and_the_world_goes_on(tmp_path: Path) -> None:
    only = "TensorPipe RPC backend only supports CPU tensors by default.*`set_device_map` on `TensorPipeRpcBackendOpt"
    with mapped(tmp_path, {"worker1": {"fake:1": "fake:1"}}, {}) as agents:
        me = agents[0]
        with pytest.raises(RuntimeError, match=rf"^args\[0\]: a tensor on fake:0 .*{only}.*Request device mapping"):
            me.call("worker1", doubled, (torch.ones(2, device=ZERO), "fake:1"))
        with pytest.raises(
            RuntimeError, match=rf"^result: a tensor on fake:0 .*{only}.*Response device mapping is not "
        ):
            me.call("worker1", made, ("fake:0",)).wait()
        rref = me.create("worker1", made, ("fake:0",))
        with pytest.raises(RuntimeError, match="Response device mapping is not available"):
            me.fetch(rref).wait()
        assert seen(me.call("worker1", doubled, (torch.ones(1), "cpu")).wait())[:2] == [CPU, [2]]
        del rref
        nothing_left(agents)


def test_a_restarted_worker_can_have_other_maps(tmp_path: Path) -> None:
    with mapped(tmp_path, {}, {"notebook": {"fake:0": "fake:1"}}) as (me, first):
        assert first.call("notebook", doubled, (torch.ones(1, device=ZERO), "fake:1")).wait().device == ZERO
        first.shutdown()
        until(lambda: len(me.members()) == 1)
        again = start_agent(config(tmp_path, 1, incarnation=1, device_maps={"notebook": {"fake:1": "fake:1"}}))
        try:
            assert again.call("notebook", doubled, (torch.ones(1, device=ONE), "fake:1")).wait().device == ONE
        finally:
            again.stop()


# -- gradients; torch runs a backward pass only on the first device of this accelerator
WEIGHT = torch.full((3,), 2.0).to(ZERO).requires_grad_()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def squared(x: torch.Tensor) -> torch.Tensor:
    assert x.device == CPU
    return x * x


def gradients(context: int) -> dict[str, list[float]]:
    found = dist_autograd.get_gradients(context)
    return {f"{leaf.device}/{grad.device}": grad.tolist() for leaf, grad in found.items()}


def test_gradients_of_arguments_return_to_the_device_of_the_caller(tmp_path: Path) -> None:
    with mapped(tmp_path, {"worker1": {"fake:0": "cpu"}}, {}) as (me, _), dist_autograd.context() as context:
        x = torch.arange(3.0).to(ZERO).requires_grad_()
        y = me.call("worker1", squared, (x,)).wait()  # on the CPU there; the gradient crosses both ways
        assert y.device == ZERO
        dist_autograd.backward(context, [(y * y).sum()])
        assert gradients(context) == {"fake:0/fake:0": [0, 4, 32]}


def test_gradients_of_a_result_go_to_the_device_of_the_callee(tmp_path: Path) -> None:
    with mapped(tmp_path, {"worker1": {"cpu": "fake:0"}}, {}) as (me, _), dist_autograd.context() as context:
        x = torch.arange(3.0, requires_grad=True)
        y = me.call("worker1", scaled, (x,)).wait()
        assert y.device == CPU
        dist_autograd.backward(context, [(y * y).sum()])
        assert gradients(context) == {"cpu/cpu": [0, 8, 16]}
        assert me.call("worker1", gradients, (context,)).wait() == {"fake:0/fake:0": [0, 4, 16]}


def through(x: torch.Tensor) -> torch.Tensor:
    assert x.device == ZERO
    answer: torch.Tensor = current.current_agent().call("worker2", squared, (x * 3,)).wait()
    assert answer.device == ZERO
    return answer + 1


def test_gradients_follow_the_maps_over_three_workers(tmp_path: Path) -> None:
    maps = {"worker1": {"cpu": "fake:0"}}, {"worker2": {"fake:0": "cpu"}}, {}
    with mapped(tmp_path, *maps) as (me, *_), dist_autograd.context() as context:
        x = torch.arange(3.0, requires_grad=True)
        y = me.call("worker1", through, (x,)).wait()
        dist_autograd.backward(context, [y.sum()])
        assert gradients(context) == {"cpu/cpu": [0, 18, 36]}


# -- the rules
@pytest.mark.parametrize("wrong", ["fake:2", "cuda:0"])
def test_a_map_with_a_missing_source_device_is_refused(tmp_path: Path, wrong: str) -> None:
    said = f"source devices with invalid indices in its device map for worker1: {wrong}; notebook has 2 of fake"
    with pytest.raises(ValueError, match=f"^Node notebook has {said}"):
        start_agent(config(tmp_path, 0, device_maps={"worker1": {wrong: "fake:0"}}))
    assert current.find_current() is None


def test_a_newcomer_that_does_not_fit_the_map_of_a_member_is_refused(tmp_path: Path) -> None:
    said = "Node notebook has target devices with invalid indices in its device map for worker1: fake:7"
    with mapped(tmp_path, {"worker1": {"fake:0": "fake:7"}}) as (me,):
        with pytest.raises(ValueError, match=said):
            start_agent(config(tmp_path, 1))
        until(lambda: len(me.members()) == 1)


# -- modules
class Plus(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, more: list[torch.Tensor]) -> Any:
        return [str(x.device), str(more[0].device), {"sum": x + self.weight}]


def test_a_remote_module_gets_inputs_on_its_device_and_returns_results_on_the_cpu(tmp_path: Path) -> None:
    with mapped(tmp_path, {}, {}):
        module = RemoteModule("worker1/fake:1", Plus)
        first, second, result = module(torch.ones(2), [torch.ones(1)])
        assert not module.is_device_map_set
        assert [first, second] == ["fake:1"] * 2 and seen(result["sum"])[:2] == [CPU, [2, 2]]


def test_a_remote_module_with_a_map_returns_results_on_the_mapped_device(tmp_path: Path) -> None:
    with mapped(tmp_path, {"worker1": {"fake:0": "fake:1"}}, {}):
        module = RemoteModule("worker1/fake:1", Plus)
        first, second, result = module(torch.ones(2), [torch.ones(1, device=ZERO)])
        assert module.is_device_map_set
        assert [first, second] == ["fake:1"] * 2 and seen(result["sum"])[:2] == [ZERO, [2, 2]]
