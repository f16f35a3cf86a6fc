"""Each public name of torch.distributed.rpc and its modules exists here, with torch's parameters and defaults.

A name is public if `__all__` lists it, or if it has no underscore and is defined there, in Python or in C++.
"""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest
import torch
import torch.distributed.rpc

import rpcbench.rpc as rpc
from rpcbench import torch_shim

MODULES = [
    "", "api", "backend_registry", "constants", "functions", "internal", "options", "rref_proxy",
    "server_process_global_profiler",
]  # fmt: skip
LEFT_OVER = {"method", "method_name", "docstring", "T"}
"""Of a loop, and a type variable."""
NOT_HERE = {"RemoteProfilerManager": "names calls for torch's own C++ profiler"}


def ours(module: str) -> types.ModuleType:
    return importlib.import_module(torch_shim._MODULES[f"torch.distributed.rpc.{module}".rstrip(".")])


def theirs(module: str) -> types.ModuleType:
    return importlib.import_module(f"torch.distributed.rpc.{module}" if module else "torch.distributed.rpc")


def public(module: str) -> set[str]:
    """The public names of a module of torch: listed and existing, or defined there."""
    there = theirs(module)
    homes = {there.__name__, *(["torch._C._distributed_rpc", "torch.distributed.rpc"] if module == "" else [])}
    own = {name for name, value in vars(there).items() if getattr(value, "__module__", "constant") in homes}
    own |= {name for name in dir(there) if name.isupper() and module == "constants"}
    own |= set(getattr(there, "__all__", ())) & set(dir(there))
    return {name for name in own if not name.startswith("_")} - LEFT_OVER - set(NOT_HERE)


NAMES = [(module, name) for module in MODULES for name in sorted(public(module))]


def test_the_list_of_public_names_is_long_enough() -> None:
    assert len(NAMES) > 45 and ("", "init_rpc") in NAMES and ("constants", "UNSET_RPC_TIMEOUT") in NAMES


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_each_public_name_exists_with_the_parameters_of_torch(module: str, name: str) -> None:
    here, there = getattr(ours(module), name), getattr(theirs(module), name)
    if isinstance(there, str | int | float):
        assert here == there
    if inspect.isfunction(there) or name == "RRefProxy" or name == "TensorPipeRpcBackendOptions":
        assert [p for p in parameters(here) if p[0] != OURS.get(name)] == parameters(there)


OURS = {"TensorPipeRpcBackendOptions": "same_modes"}
"""Parameters that torch's has not."""


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


PRIVATE = {  # names with an underscore that programs and torch's own tests use
    "": """_delete_all_user_and_unforked_owner_rrefs _get_current_rpc_agent _get_debug_info _init_rpc_backend
        _is_current_rpc_agent_set _rref_context_get_debug_info _server_process_global_profile _set_and_start_rpc_agent
        _set_rpc_timeout""",
    "api": """_all_gather _barrier _broadcast_to_followers _default_pickler _delete_all_user_and_unforked_owner_rrefs
        _gather_to_leader _get_current_rpc_agent _ignore_rref_leak _init_rpc_states _is_current_rpc_agent_set
        _require_initialized _set_and_start_rpc_agent _thread_local_var _to_worker_info _use_rpc_pickler _wait_all
        _wait_all_workers""",
    "internal": "_InternalRPCPickler _build_rpc_profiling_key _internal_rpc_pickler _run_function",
    "server_process_global_profiler": "_server_process_global_profile",
}


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in PRIVATE.items() for name in names.split()])
def test_each_name_with_an_underscore_that_programs_use_exists(module: str, name: str) -> None:
    here, there = getattr(ours(module), name), getattr(theirs(module), name)
    assert callable(here) == callable(there)


@pytest.mark.parametrize("of", ["PyRRef", "RpcAgent", "TensorPipeAgent", "WorkerInfo", "RpcBackendOptions"])
def test_classes_have_all_methods_and_attributes_of_torch(of: str) -> None:
    here, there = getattr(rpc, of), getattr(torch.distributed.rpc, of)
    names = {name for name in dir(there) if not name.startswith("_")} - {"store"}  # torch's own rendezvous
    made = rpc.RpcBackendOptions() if of == "RpcBackendOptions" else here
    assert {name for name in names if not hasattr(made, name)} == set()


METHODS = {  # torch's are C++: the parameters in their docstrings
    "to_here": {"timeout": -1.0},
    "rpc_sync": {"timeout": -1.0},
    "rpc_async": {"timeout": -1.0},
    "remote": {"timeout": -1.0},
    "_get_type": {"timeout": -1.0, "blocking": True},
    "backward": {"dist_autograd_ctx_id": -1, "retain_graph": False},
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_rrefs_have_the_parameters_of_torch(name: str) -> None:
    theirs_say = inspect.getdoc(getattr(torch.distributed.rpc.PyRRef, name)) or ""
    assert all(word in theirs_say for word in METHODS[name])
    assert {p: d for p, _, d in parameters(getattr(rpc.RRef, name)) if p != "self"} == METHODS[name]
