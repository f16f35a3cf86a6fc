"""Backends by name, the backend and options of `init_rpc`, and the metrics and profiles of an agent."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worlds import until

import rpcbench.rpc as rpc
from rpcbench.rpc import BackendType, init
from rpcbench.rpc.backend_registry import _Backends


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the backends that a test registers."""
    monkeypatch.setattr(_Backends, "_members", dict(BackendType._members), raising=False)
    monkeypatch.setattr(BackendType, "_members", dict(BackendType._members))


@pytest.fixture
def options(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[rpc.TensorPipeRpcBackendOptions]:
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield rpc.TensorPipeRpcBackendOptions(init_method="file:///nowhere/backends", num_worker_threads=3)
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)


def test_a_registered_backend_is_a_lasting_member_of_backend_type(registry: None) -> None:
    first, before = BackendType.TENSORPIPE, list(BackendType)
    made = rpc.register_backend("OTHER", rpc.RpcBackendOptions, init.join_world)
    assert made is BackendType["OTHER"] is BackendType.OTHER and first is BackendType.TENSORPIPE
    assert list(BackendType) == [*before, made] and len(BackendType) == len(before) + 1 and first in before
    assert set(BackendType.__members__) == {member.name for member in before} | {"OTHER"}
    assert repr(made) == "BackendType.OTHER" and isinstance(made, BackendType) and made.name == "OTHER"
    assert made.value == rpc.BackendValue(rpc.RpcBackendOptions, init.join_world)
    assert rpc.backend_registered("OTHER") and not rpc.backend_registered("NO")
    assert pickle.loads(pickle.dumps(made)) is made
    with pytest.raises(RuntimeError, match=r"^RPC backend OTHER: already registered$"):
        rpc.register_backend("OTHER", rpc.RpcBackendOptions, init.join_world)
    with pytest.raises(AttributeError, match=r"no RPC backend .NO. is registered; there are: TENSORPIPE, .*OTHER"):
        BackendType.NO
    with pytest.raises(KeyError):
        BackendType["NO"]


def test_construct_rpc_backend_options_returns_the_options_of_the_backend() -> None:
    made = rpc.construct_rpc_backend_options(BackendType.TENSORPIPE, rpc_timeout=7, num_worker_threads=2)
    assert isinstance(made, rpc.TensorPipeRpcBackendOptions)
    assert (made.rpc_timeout, made.init_method, made.num_worker_threads) == (7, "env://", 2)


class OwnOptions(rpc.RpcBackendOptions):
    """The options of a custom backend."""


def test_a_custom_backend_is_inferred_from_its_options_and_joins(
    registry: None, options: rpc.TensorPipeRpcBackendOptions
) -> None:
    asked: list[dict[str, Any]] = []

    def join(**kwargs: Any) -> Any:
        asked.append(kwargs)
        return init.join_world(**kwargs)

    backend = rpc.register_backend("OWN", lambda rpc_timeout, init_method: OwnOptions(rpc_timeout, init_method), join)
    own = rpc.construct_rpc_backend_options(backend, init_method=options.init_method)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=own)
    assert rpc.rpc_sync("me", abs, (-2,)) == 2
    (kwargs,) = asked
    assert kwargs == {"store": None, "name": "me", "rank": 0, "world_size": 1, "rpc_backend_options": own}
    rpc.shutdown()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "TENSORPIPE"}, "Argument backend must be a member of BackendType"),
        ({"rpc_backend_options": {"init_method": "env://"}}, "must be an instance of RpcBackendOptions"),
        ({"rpc_backend_options": rpc.RpcBackendOptions()}, "Could not infer backend for options"),
    ],
)
def test_init_rpc_refuses_arguments_of_wrong_types(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        rpc.init_rpc("me", rank=0, world_size=1, **arguments)


def test_init_rpc_refuses_a_backend_that_returns_no_agent(
    registry: None, options: rpc.TensorPipeRpcBackendOptions
) -> None:
    backend = rpc.register_backend("STUB", OwnOptions, lambda **kwargs: object())
    with pytest.raises(TypeError, match="must be an rpcbench Agent"):
        rpc.init_rpc("me", backend, rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize("timeout", [None, "3", True, torch.zeros(1)])
def test_a_timeout_that_is_no_number_is_refused(timeout: Any) -> None:
    for options in (rpc.RpcBackendOptions, rpc.TensorPipeRpcBackendOptions):
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            options(rpc_timeout=timeout)


# -- metrics
def test_an_agent_has_the_metrics_of_an_agent_of_torch(options: rpc.TensorPipeRpcBackendOptions) -> None:
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    agent = rpc._get_current_rpc_agent()
    assert isinstance(agent, rpc.TensorPipeAgent) and isinstance(agent, rpc.RpcAgent) and agent.is_static_group
    assert agent.get_worker_info() == agent.get_worker_info("me") == agent.get_worker_info(0) == rpc.WorkerInfo("me", 0)
    idle = {
        "agent.thread_pool_size": "3", "agent.num_idle_threads": "3", "agent.client_active_calls": "0",
        "agent.server_active_calls": "0", "agent.server_active_async_calls": "0",
    }  # fmt: skip
    assert agent.get_debug_info() == agent.get_metrics() == idle
    gate, promise = threading.Event(), torch.futures.Future()
    _KEPT.update(gate=gate, promise=promise)
    calls = [rpc.rpc_async("me", _wait), rpc.rpc_async("me", _later)]
    busy = {
        **idle, "agent.num_idle_threads": "2", "agent.client_active_calls": "2", "agent.server_active_calls": "2",
        "agent.server_active_async_calls": "1",
    }  # fmt: skip
    until(lambda: agent.get_metrics() == busy, f"{busy}, have {agent.get_metrics()}")
    gate.set()
    promise.set_result(3)
    assert [call.wait() for call in calls] == [True, 3]
    agent.join()
    assert agent.get_metrics()["agent.client_active_calls"] == "0"
    whole = {"num_owner_rrefs", "num_pending_users", "num_forks", "num_pending_futures", "num_autograd_contexts"}
    assert rpc._get_debug_info().keys() == {*idle, *whole, "num_current_backward_passes"}


_KEPT: dict[str, Any] = {}


def _wait() -> bool:
    return bool(_KEPT["gate"].wait(20))


@rpc.functions.async_execution
def _later() -> Any:
    return _KEPT["promise"]


def test_waits_for_the_gil_are_measured_on_demand(options: rpc.TensorPipeRpcBackendOptions) -> None:
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    name = "agent.gil_average_wait_time_us"
    assert name not in rpc._get_debug_info()
    rpc.enable_gil_profiling(True)
    rpc.rpc_sync("me", abs, (1,))
    assert int(rpc._get_debug_info()[name]) >= 0 and rpc._get_current_rpc_agent()._gil_waits[0] == 1
    rpc.enable_gil_profiling(False)
    assert name not in rpc._get_debug_info()


def test_a_callee_prints_the_error_of_a_called_function_on_stderr(
    options: rpc.TensorPipeRpcBackendOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    with pytest.raises(ValueError, match="invalid literal"):
        rpc.rpc_sync("me", int, ("x",))
    told = capsys.readouterr().err
    assert told.startswith("On WorkerInfo(id=0, name=me):\nValueError(") and "Traceback (most recent call last)" in told


# -- profiles
def test_calls_are_events_of_the_legacy_profiler(options: rpc.TensorPipeRpcBackendOptions) -> None:
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    with torch.autograd.profiler_legacy.profile() as profile:
        rpc.rpc_sync("me", torch.add, (torch.ones(1), 1))
        rpc.rpc_async("me", Thing.name, (None,)).wait()
        rpc.remote("me", Thing)._get_future().wait()
    names = {event.name for event in profile.function_events}
    assert {"rpc_sync#aten::add(me -> me)", "rpc_async#Thing.name(me -> me)", "rpc_remote#Thing(me -> me)"} <= names


class Thing:
    def name(self) -> str:
        return "thing"


def test_the_process_global_profile_records_all_calls_that_are_served_within_it(
    options: rpc.TensorPipeRpcBackendOptions,
) -> None:
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    outer, inner = (rpc.remote("me", rpc._server_process_global_profile) for _ in range(2))
    outer.rpc_sync().__enter__()
    rpc.rpc_sync("me", torch.add, (torch.ones(1), 1))
    inner.rpc_sync().__enter__()
    rpc.rpc_sync("me", torch.sub, (torch.ones(1), 1))
    for profile in (inner, outer):
        profile.rpc_sync().__exit__(None, None, None)
    seen = [{event.name for event in profile.local_value().function_events} for profile in (inner, outer)]
    assert "aten::sub" in seen[0] and "aten::add" not in seen[0] and {"aten::sub", "aten::add"} <= seen[1]
    assert any("aten::sub" in {e.name for e in call} for call in inner.local_value().process_global_function_events)
    rpc.rpc_sync("me", torch.mul, (torch.ones(1), 1))
    assert rpc.rpc_sync("me", torch.autograd._profiler_enabled) is False
