"""Replacement of torch.distributed.{rpc,autograd,optim,nn} by our modules, for programs written for torch.

It also replaces the C++ modules below them, torch._C._distributed_{rpc,autograd}, from which libraries import classes.
Names of torch's own runtime without a counterpart here can be imported, and raise NotImplementedError on use.

`bind_modules()` replaces the modules in this process. With `extend_environment()` a new Python process, and every
process that it starts in turn, does so itself as soon as torch is imported (`site/sitecustomize.py`). Only these names
change: modules that imported them before keep torch's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

__all__ = ["VARIABLE", "bind_modules", "extend_environment"]

VARIABLE = "RPCBENCH_REBIND"  # set in processes that replace the modules themselves
_SITE = Path(__file__).parent / "site"  # goes first on PYTHONPATH
_MODULES = {  # torch's module -> ours
    "torch._C._distributed_autograd": "rpcbench.autograd",
    "torch._C._distributed_rpc": "rpcbench.rpc",
    "torch.distributed.autograd": "rpcbench.autograd",
    "torch.distributed.rpc": "rpcbench.rpc",
    **{
        f"torch.distributed.rpc.{part}": f"rpcbench.rpc.{part}"
        for part in (
            "api", "backend_registry", "constants", "functions", "options", "rref_proxy",
        )
    },
    "torch.distributed.rpc.internal": "rpcbench.torch_shim.compat.internal",
    "torch.distributed.rpc.server_process_global_profiler":
        "rpcbench.torch_shim.compat.server_process_global_profiler",
    "torch.distributed.optim.optimizer": "rpcbench.optim",
    "torch.distributed.nn.api.remote_module": "rpcbench.nn",
}  # fmt: skip
_NAMES = {  # names that packages with more than RPC import from these modules: package -> name, our module
    "torch.distributed.optim": ("DistributedOptimizer", "rpcbench.optim"),
    "torch.distributed.nn": ("RemoteModule", "rpcbench.nn"),
}
_OF_AGENTS = """_cleanup_python_rpc_handler _destroy_rref_context _invoke_remote_builtin _invoke_remote_python_udf
    _invoke_remote_torchscript _invoke_rpc_builtin _invoke_rpc_python_udf _invoke_rpc_torchscript
    _reset_current_rpc_agent RemoteProfilerManager"""
_OF_PROFILERS = "_disable_server_process_global_profiler _enable_server_process_global_profiler"
_NOT_OFFERED = {  # torch's module -> functions and classes of its own runtime alone
    "torch.distributed.rpc": f"""{_OF_AGENTS} {_OF_PROFILERS} _disable_jit_rref_pickle _enable_jit_rref_pickle
        _set_profiler_node_id _validate_rpc_args""",
    "torch.distributed.rpc.api": f"""{_OF_AGENTS} _enable_rpc_profiler _finalize_shutdown _get_should_profile
        _invoke_rpc _rref_typeof_on_owner _rref_typeof_on_user""",
    "torch.distributed.rpc.backend_registry": """_backend_type_repr _create_device_list _create_reverse_mapping
        _get_device_infos _init_process_group _set_devices_and_reverse_device_map
        _tensorpipe_construct_rpc_backend_options_handler _tensorpipe_exchange_and_check_all_device_maps
        _tensorpipe_init_backend_handler _tensorpipe_validate_devices _validate_device_maps""",
    "torch.distributed.rpc.internal": "_handle_exception _start_record_function",
    "torch.distributed.rpc.options": "_to_device _to_device_list _to_device_map",
    "torch.distributed.rpc.rref_proxy": "_invoke_rpc _local_invoke _local_invoke_async_execution",
    "torch.distributed.rpc.server_process_global_profiler": _OF_PROFILERS,
    "torch.distributed.optim.optimizer": """_FunctionalLocalOptimizer _LocalOptimizer _ScriptLocalOptimizer
        _ScriptLocalOptimizerInterface _functional_local_optimizer_step _local_optimizer_step
        _new_functional_local_optimizer _new_local_optimizer _new_script_local_optimizer
        _wait_for_all""",  # those with `functional` are in torch 2.14, those with `script` in 2.13
    "torch.distributed.nn.api.remote_module": """_SerializedRemoteModule _create_module _create_module_with_interface
        _instantiate_template _param_rrefs _raise_not_supported _recursive_script_module_receiver
        _recursive_script_module_reducer _remote_module_receiver _remote_module_reducer""",
}


class _NotOffered(type):
    """The type of a missing name: a class, for isinstance and subclassing; a call or an attribute of it raises."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__name__} is a part of torch's own RPC runtime, and rpcbench runs in its place "
            "without one: use the public functions of torch.distributed.rpc, or run the program without `rpcbench run`"
        )

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks these up, also in isinstance and class statements
            raise AttributeError(name)
        cls()


def bind_modules() -> None:
    """Replace the modules: later imports of them get ours. torch must be imported already."""
    for theirs, ours in _MODULES.items():
        module = importlib.import_module(ours)
        package, _, name = theirs.rpartition(".")
        if package in sys.modules:  # `import a.b` reads sys.modules, but `a.b` and `from a import b` the attribute
            setattr(sys.modules[package], name, module)
        sys.modules[theirs] = module
    for theirs, names in _NOT_OFFERED.items():
        for name in names.split():
            setattr(sys.modules[theirs], name, _NotOffered(name, (), {"__module__": theirs}))
    for package, (name, ours) in _NAMES.items():
        if package in sys.modules:
            setattr(sys.modules[package], name, getattr(sys.modules[ours], name))


def extend_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment `base`, extended for processes that are to replace the modules themselves."""
    path = [str(_SITE), *filter(None, [base.get("PYTHONPATH")])]
    return {**base, VARIABLE: "1", "PYTHONPATH": os.pathsep.join(path)}
