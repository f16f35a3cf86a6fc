"""torch's faulty backend: its options, its kinds of messages here, and worlds of one rank that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rpcbench.rpc as rpc
from rpcbench.base.errors import ConnectionLostError, RpcTimeoutError
from rpcbench.base.ids import Id
from rpcbench.testing import FAULTY, KINDS, Faults, FaultyTensorPipeRpcBackendOptions, backend, faulty_options
from rpcbench.wire import messages as m

IDS = (Id(0, 0), Id(0, 1))
MESSAGES = [
    (m.Call(0, "add", None, (), None, m.EMPTY), {"SCRIPT_CALL"}),
    (m.Call(0, "torch.add", None, (), None, m.EMPTY), {"SCRIPT_CALL"}),
    (m.Call(0, "train", None, (), None, m.EMPTY), {"PYTHON_CALL"}),
    (m.Call(0, "max", None, (), None, m.EMPTY), {"PYTHON_CALL"}),
    (m.Call(0, "torch.max", None, (), None, m.EMPTY), {"SCRIPT_CALL"}),
    (m.Create(0, *IDS, "mul", None, (), None, None, m.EMPTY), {"SCRIPT_REMOTE_CALL"}),
    (m.Create(0, *IDS, "Net", None, (), None, None, m.EMPTY), {"PYTHON_REMOTE_CALL"}),
    (m.Fetch(0, IDS[0], None, None), {"PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL"}),
    (m.Result(0, (), None, m.EMPTY), {"PYTHON_RET", "SCRIPT_RET"}),
    (m.ForkRequest(*IDS), {"RREF_FORK_REQUEST"}),
    (m.ForkAccept(*IDS), {"RREF_ACK"}),
    (m.ChildAccept(IDS[1]), {"RREF_CHILD_ACCEPT"}),
    (m.UserDelete(*IDS), {"RREF_USER_DELETE"}),
    (m.Gradients(0, IDS[0], 0, False, True, (), None, m.EMPTY), {"BACKWARD_AUTOGRAD_REQ"}),
    (m.Settled(0, IDS[0], 0, (), ()), {"BACKWARD_AUTOGRAD_RESP"}),
    (m.ReleaseContext(0), {"CLEANUP_AUTOGRAD_CONTEXT_REQ"}),
    (m.View(0, (), (), False, False), set()),
]


@pytest.mark.parametrize(("message", "kinds"), MESSAGES)
def test_each_message_matches_its_kinds_of_torch(message: m.Message, kinds: set[str]) -> None:
    assert {kind for kind, means in KINDS.items() if means(message)} == kinds


def test_each_kind_of_torch_has_its_message() -> None:
    assert set().union(*(kinds for _, kinds in MESSAGES)) == KINDS.keys()


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="RREF_FORK_REQUEST"):
        FaultyTensorPipeRpcBackendOptions(messages_to_fail=["FORK_REQUEST"])


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    url = f"file://{tmp_path}/meeting"

    def one_rank(options: rpc.RpcBackendOptions) -> None:
        options.init_method = url
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)

    yield one_rank
    rpc.shutdown()


def test_a_kind_of_message_fails_as_often_as_the_options_ask(join: Any) -> None:
    join(faulty_options("", ["PYTHON_REMOTE_CALL"], {}))
    rref = rpc.remote("alone", divmod, (17, 5))
    with pytest.raises(ConnectionLostError, match="RRef creation"):
        rref.to_here()
    assert torch.equal(rpc.remote("alone", torch.ones, (2,)).to_here(), torch.ones(2))


def test_calls_of_operators_of_torch_fail_alone_if_the_options_ask(join: Any) -> None:
    join(faulty_options("", ["SCRIPT_CALL"], {}))
    with pytest.raises(ConnectionLostError):
        rpc.rpc_sync("alone", torch.add, (torch.ones(2), 1))
    assert rpc.rpc_sync("alone", divmod, (17, 5)) == (3, 2)


def test_a_kind_of_message_is_delayed_as_long_as_the_options_ask(join: Any) -> None:
    join(faulty_options("", [], {"PYTHON_CALL": 2.0}))
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("alone", divmod, (17, 5), timeout=0.1)
    assert rpc.rpc_sync("alone", divmod, (17, 5)) == (3, 2)


def test_the_options_accept_other_faults(join: Any) -> None:
    faults = Faults(retry_seconds=0.1)
    faults.drop("Call")
    join(FaultyTensorPipeRpcBackendOptions(faults=faults))
    with pytest.raises(ConnectionLostError):
        rpc.rpc_sync("alone", divmod, (17, 5))
    assert any("Call(" in line and line.endswith(": lost") for line in faults.history)


def test_the_default_backend_is_tensorpipe() -> None:
    assert backend().name == "TENSORPIPE" and FAULTY.name == "FAULTY_TENSORPIPE"
