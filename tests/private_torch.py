"""The one list of private names of torch that rpcbench uses, and the search of the source that keeps it complete.

A later torch may lack any of them without notice. `test_private_torch.py` looks each name up in the installed torch,
and fails for a private name in the source that is not in the list. The search sees chains of attributes that begin at
an import of torch, attributes of other values, and texts that are such a name or path. It does not see a name that
rpcbench itself defines somewhere, too.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent

USES = {  # what fails without them → the names; of an attribute of a value, with the class that has it
    "futures": """
        torch._C.Future.__init__ torch._C.wait torch._C._collect_all torch.futures.Future._set_unwrap_func""",
    "distributed autograd": """
        torch._C.DisableTorchFunctionSubclass torch._C._FunctionBase._input_metadata
        torch._C._functions.AccumulateGrad torch._C._are_functorch_transforms_active torch._C._current_graph_task_id
        torch._C._set_grad_enabled torch._C._get_obj_in_tls torch._C._is_key_in_tls torch._C._stash_obj_in_tls
        torch.Tensor._backward_hooks torch.Tensor._is_view torch.Tensor._make_subclass torch.UntypedStorage._cdata
        torch.nn.Module._parameters
        torch.autograd.Function._backward_cls torch.autograd.graph._engine_run_backward""",
    "calls of operators by name": """
        torch._C._VariableFunctions torch._C._fft torch._C._linalg torch._C._nn torch._C._special
        torch._C._jit_get_schemas_for_operator""",
    "profiles of calls": """
        torch._C._autograd._profiler_enabled torch._C._autograd._profiler_type torch.jit._builtins._find_builtin
        torch._C._autograd._disable_profiler_legacy torch._C._autograd._enable_profiler_legacy
        torch._C._profiler.ActiveProfilerType.LEGACY torch._C._profiler._ExperimentalConfig
        torch._C._profiler.ProfilerConfig torch._C._profiler.ProfilerState.CPU
        torch.autograd.profiler._is_profiler_enabled torch.autograd.profiler_legacy._parse_legacy_records
        torch.autograd.profiler.record_function._call_end_callbacks_on_future
        torch.autograd.profiler_util.EventList._build_tree""",
    "serialization of tensors": """
        torch.Tensor._indices torch.Tensor._values torch._C._functorch.is_functorch_wrapped_tensor
        torch._empty_affine_quantized torch._empty_per_channel_affine_quantized torch._is_functional_tensor
        torch._neg_view torch._subclasses.fake_tensor.FakeTensor
        torch._subclasses.functional_tensor.FunctionalTensor torch._utils._get_obj_state torch._utils._set_obj_state
        torch.jit._trace._torchdynamo_inline""",
    "pipelines: split, traced model, recomputation": """
        torch._C._dispatch_dump torch._functorch torch._higher_order_ops torch._library.custom_ops.OPDEFS.get
        torch._library.custom_ops.CustomOpDef._init_fn torch._library.simple_registry.singleton.find torch._assert
        torch._ops.HigherOrderOperator torch._ops.OpOverload._schema
        torch.autograd.function.BackwardCFunction._forward_cls torch._C._functorch._vmap_increment_nesting
        torch._C._functorch._vmap_decrement_nesting torch.nn.Module._backward_hooks torch.Tensor._version
        torch.nn.Module._backward_pre_hooks torch.nn.Module._forward_hooks torch.nn.Module._forward_pre_hooks
        torch.nn.modules.batchnorm._BatchNorm torch.utils._pytree.TreeSpec torch.utils._pytree._retrieve_constant
        torch.utils._pytree.tree_flatten torch.utils._pytree.tree_leaves torch.utils._pytree.tree_map_only
        torch.utils._pytree.tree_unflatten""",
    "pipelines: sums of gradients": """
        torch.Tensor._post_accumulate_grad_hooks torch._C._storage_Use_Count
        torch._C._distributed_c10d.ProcessGroupGloo._Options._timeout
        torch._C._distributed_c10d.ProcessGroupGloo.create_device""",
    "process groups on rpcbench's messages": """
        torch._C._distributed_c10d.Backend torch._C._distributed_c10d.FileStore
        torch._C._distributed_c10d.GradBucket torch._C._distributed_c10d.HashStore
        torch._C._distributed_c10d.PrefixStore torch._C._distributed_c10d.Store torch._C._distributed_c10d.TCPStore
        torch.distributed.distributed_c10d._get_default_group torch.distributed.distributed_c10d._get_default_store
        torch.distributed.distributed_c10d._world.default_pg torch.distributed.distributed_c10d._world.group_count
        torch.distributed.distributed_c10d._world.pg_map torch.distributed.rendezvous._rendezvous_handlers
        torch._C._distributed_c10d.ProcessGroup._device_types torch._C._distributed_c10d.ProcessGroup._get_backend""",
    "torch's own collectives, watched": """
        torch._C.DisableTorchFunction torch._C.DispatchKey.BackendSelect torch._C._dispatch_keyset_full_after
        torch._C._distributed_c10d.ProcessGroup._get_sequence_number_for_group torch._C._distributed_c10d.Work.unbox
        torch._C._distributed_c10d._dump_fr_trace_json torch.library.Library._destroy
        torch.ops.c10d._allgather_base_ torch.ops.c10d._reduce_scatter_base_ torch.nn.Module._wrapped_call_impl""",
    "recorded schedules of torch": """
        torch.distributed.pipelining.schedules._PipelineSchedule._has_backward
        torch.distributed.pipelining.schedules._PipelineSchedule._n_microbatches
        torch.distributed.pipelining.schedules.PipelineScheduleSingle._stage
        torch.distributed.pipelining.stage._PipelineStageBase""",
    "compared pipelines": "torch.distributed.pipelining.stage.PipelineStage._compute_outputs.__code__",
    "shards of models, watched": """
        torch.distributed.tensor._utils.compute_local_shape_and_global_offset
        torch.distributed.tensor._utils._compute_local_shape_and_global_offset
        torch.distributed.tensor.DTensor._local_tensor torch.distributed.device_mesh.DeviceMesh._get_root_mesh
        torch.distributed.fsdp.FSDPModule._get_fsdp_state
        torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups
        torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._module_info
        torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._orig_size
        torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_dtensor_spec
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._module_fqn
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded_post_forward
        torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_unsharded
        torch._dynamo.eval_frame.OptimizedModule._orig_mod
        torch.distributed.algorithms._checkpoint.checkpoint_wrapper._checkpoint_wrapped_module
        torch.distributed.fsdp._common_utils._fsdp_wrapped_module""",
    "simulated ranks": """
        torch._subclasses.fake_tensor.DataDependentOutputException
        torch._subclasses.fake_tensor.DynamicOutputShapeException torch._subclasses.fake_tensor.FakeTensorMode
        torch._subclasses.fake_tensor.UnsupportedOperatorException
        torch.testing._internal.distributed.fake_pg.FakeStore torch.utils._python_dispatch._disable_current_modes
        torch.utils._python_dispatch.TorchDispatchMode torch.nn.parallel.DistributedDataParallel._pre_forward
        torch.autograd.Variable._execution_engine.queue_callback
        torch.distributed.device_mesh.DeviceMesh._concatenate torch._C._get_dispatch_mode
        torch._C._TorchDispatchModeKey.FAKE torch._C._distributed_c10d.FakeWork.unbox
        torch._C._distributed_c10d.Reducer._rebuild_buckets torch._scaled_mm
        torch.distributed.pipelining.schedules._PipelineSchedule._warmup_p2p
        torch.distributed.pipelining.stage._PipelineStageBase.forward_one_chunk
        torch.distributed.pipelining.stage._PipelineStageBase.backward_one_chunk
        torch.distributed.pipelining.stage._PipelineStageBase.backward_weight_one_chunk
        torch.distributed.pipelining.stage.PipelineStage._inference_mode
        torch.distributed.pipelining.stage.PipelineStage._user_meta
        torch.distributed.pipelining._utils.InferenceMode.STATIC
        torch.distributed.pipelining._utils.InferenceMode.needs_dynamic torch.cpu._default_cpu_stream
        torch.cpu._current_stream torch._ops.OpOverload._opname torch._ops.OpOverload._overloadpacket
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward torch.ops._c10d_functional
        torch.ops._dtensor torch.ops._c10d_functional_autograd
        torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached
        torch.distributed.tensor._redistribute._gen_transform_infos.cache_clear
        torch.distributed.tensor._redistribute.clear_redistribute_planner_cache
        torch.distributed.tensor.debug._clear_sharding_prop_cache torch._foreach_copy_ torch._foreach_zero_
        torch.cuda._lazy_init torch.distributed.distributed_c10d._new_process_group_helper
        torch.ops.c10d._allgather_base_.default torch.ops.c10d._reduce_scatter_base_.default
        torch.ops.aten._local_scalar_dense torch.utils.data.dataloader._BaseDataLoaderIter
        torch._C._swap_tensor_impl""",
    "workers that start at once": "torch._dynamo torch._inductor.config",
}
OTHERS = {  # private names that are not torch's → whose they are
    "accelerate": "_reset_state",
    "Python": """
        _abc_impl _actions _asdict _current_frames _exit _field_defaults _fields _getframe _lru_cache_wrapper
        _run_exitfuncs _subparsers
        _value2member_map_""",
    "IPython": "_filename_map _jupyter_types_experimental _render_traceback_ _sd _validate_data",
    "ipykernel and ipywidgets": "_control_lock _handle_event _main_asyncio_lock _msg_callback _publish_status "
    "_reply_subshell_for",
    "Ray": "_group_",
    "rpcbench, as texts": "_rpcbench_shards _spmd _wrapped_async_rpc_function",
    "modules that rpcbench puts there": "torch._C._distributed_autograd torch._C._distributed_rpc",
}

_PATH = re.compile(r"torch(\.\w+)*\._[A-Za-z][\w.]*")
_NAME = re.compile(r"_[A-Za-z]\w*")


@functools.cache
def search(root: Path) -> dict[str, set[str]]:
    """Paths that begin at torch, and names of attributes of other values → the files that use them."""
    trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for name in _used(tree):
            if name not in own:
                found.setdefault(name, set()).add(file)
    return {name: files for name, files in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def _used(tree: ast.Module) -> Iterator[str]:
    paths = dict(_bindings(tree))
    yield from filter(_PATH.fullmatch, paths.values())
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                path = _path(node, paths)
                if path is None and _NAME.fullmatch(name):
                    yield name
                elif path is not None and id(node) not in inner and _PATH.fullmatch(path):
                    yield path.removesuffix(".__name__")
            case ast.Constant(value=str(text)) if _PATH.fullmatch(text) or _NAME.fullmatch(text):
                yield text.rstrip(".")


def _bindings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in this module, path of what of torch it is)."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((each.asname or "torch", each.name if each.asname else "torch") for each in names
                            if each.name.split(".")[0] == "torch")  # fmt: skip
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] == "torch":
                yield from ((each.asname or each.name, f"{module}.{each.name}") for each in names)


def _path(node: ast.expr, paths: dict[str, str]) -> str | None:
    match node:
        case ast.Name(id=name):
            return paths.get(name)
        case ast.Attribute(value=value, attr=name):
            before = _path(value, paths)
            return None if before is None else f"{before}.{name}"
    return None


def listed() -> dict[str, str]:
    """Each listed name of torch → what fails without it."""
    return {name: use for use, names in USES.items() for name in names.split()}


def unlisted(root: Path) -> list[str]:
    """Private names in the source that are in neither list, and listed ones that no file uses."""
    used = search(root)
    paths = [*listed(), *(name for names in OTHERS.values() for name in names.split())]
    new = [name for name in used if not any(is_part(name, path) for path in paths)]
    old = [path for path in paths if not any(is_part(name, path) for name in used)]
    return [f"{name} in {files_of(name, used)}: add it to the list" for name in new] + [
        f"{path}: no file uses it" for path in old
    ]


def is_part(name: str, path: str) -> bool:
    """Whether a name that the source uses is a listed path, or the beginning of one, or the end of its last part."""
    return f"{path}.".startswith(f"{name}.") or ("." not in name and path.endswith(name))


def files_of(path: str, used: dict[str, set[str]]) -> str:
    return ", ".join(sorted({file for name, files in used.items() if is_part(name, path) for file in files}))


def find(path: str) -> Any:
    """The value of a path that begins at torch. LookupError with the part that is not there."""
    found: Any = importlib.import_module("torch")
    parts = path.split(".")
    for place, part in enumerate(parts[1:], 1):
        before = ".".join(parts[:place])
        try:  # a function may have the name of its module, so the module comes first
            found = sys.modules.get(f"{before}.{part}") or _attribute(found, part)
        except AttributeError:
            raise LookupError(f"{before} has no {part}") from None
    return found


def _attribute(owner: Any, name: str) -> Any:
    if hasattr(owner, name):
        return getattr(owner, name)
    if isinstance(owner, ModuleType):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{owner.__name__}.{name}")
    with contextlib.suppress(OSError, TypeError):  # it has no source in Python
        if re.search(rf"\b{name}\b", inspect.getsource(owner)):
            return None  # an attribute of instances, or a text
    raise AttributeError(name)
