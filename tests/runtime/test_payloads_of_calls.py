"""The codec in whole calls: script functions as targets, meta models, and the path of an unpicklable part."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rpcbench.base.errors import RpcError, SerializationError
from rpcbench.runtime.requests import function_label
from rpcbench.wire.messages import EMPTY, Result
from tests.worlds import nothing_left, world

LOCK = threading.Lock()


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def made(**held: Any) -> Any:
    return {"list": [Holder(held or LOCK)]}


class Odd(Exception):
    def __init__(self) -> None:
        super().__init__("odd")
        self.lock = LOCK


def raising() -> None:
    raise Odd


def test_the_label_of_a_function_is_the_name_that_users_write() -> None:
    labels = [function_label(one) for one in (torch.add, torch.ones, torch.relu, abs, len, raising, torch.Tensor.add)]
    assert labels == ["torch.add", "torch.ones", "torch.relu", "abs", "len", "raising", "TensorBase.add"]


@pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]*` is deprecated")
def test_script_functions_and_modules_can_be_called_remotely(tmp_path: Path) -> None:
    function = torch.jit.trace(lambda x: x * 3, torch.ones(1))
    module = torch.jit.script(torch.nn.Linear(2, 2))
    assert function_label(module) == "Linear" and function_label(torch.jit.script(made_for_script)) == "made_for_script"
    with world(tmp_path, 2) as agents:
        assert agents[0].call("worker1", function, (torch.ones(2),)).wait().tolist() == [3, 3]
        x = torch.ones(2)
        assert torch.equal(agents[0].call("worker1", module, (x,)).wait(), module(x))
        rref = agents[0].create("worker1", function, (torch.ones(1),))
        assert agents[0].fetch(rref).wait().item() == 3
        del rref
        nothing_left(agents)


def made_for_script(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_meta_model_can_be_given_memory_on_the_worker(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    with world(tmp_path, 2) as (me, _):
        there = me.call("worker1", model.to_empty, (), {"device": "cpu"}).wait()
        assert not there.weight.is_meta and model.weight.is_meta


def test_an_unpicklable_result_is_named_with_its_path(tmp_path: Path) -> None:
    path = r"result\['list'\]\[0\]\.held: cannot pickle '_thread.lock' object"
    with world(tmp_path, 2) as agents:
        me = agents[0]
        with pytest.raises(SerializationError, match=f"^{path}"):
            me.call("worker1", made).wait()
        rref = me.create("worker1", made)
        with pytest.raises(SerializationError, match=f"^{path}"):
            me.fetch(rref).wait()
        with pytest.raises(SerializationError, match=r"^kwargs\['x'\]\['list'\]\[0\].held: cannot pickle"):
            me.call("worker1", made, (), {"x": made()})
        with pytest.raises(Odd, match="odd") as caught:
            me.call("worker1", raising).wait()
        assert "lock" in caught.value.lock  # the repr is sent in place of the lock
        assert "raise Odd" in str(caught.value.__cause__)
        del rref
        nothing_left(agents)


def test_after_the_loss_of_a_message_sources_are_sent_again(tmp_path: Path) -> None:
    with world(tmp_path, 2) as agents:
        files = agents[0].calls.values.routes.route_to(1, False).files
        assert files is not None
        files.add("cell")
        lost = Result(7, (), None, EMPTY)
        agents[0].machine.feed_event(
            lambda node: node.take_back_message(1, lost, RpcError("the caller no longer waits"))
        )
        assert not files
