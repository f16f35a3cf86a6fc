"""Modules on other workers: a drop-in for `torch.distributed.nn.RemoteModule`.

    module = RemoteModule("worker1", nn.Linear, (20, 30))
    y = module(x)                                # runs on worker1; recorded, inside an autograd context
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.05)

It is a plain class without generated code, so modules defined in a notebook cell work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rpcbench.base.errors import NOT_INITIALIZED, SerializationError, UnknownWorkerError
from rpcbench.base.futures import Future
from rpcbench.rpc import RRef, rpc_async
from rpcbench.rpc.api import arguments_of
from rpcbench.runtime import current
from rpcbench.serialization.pickler import register_reducer

__all__ = ["RemoteModule"]

# torch's name; its programs and tests read it.
_REMOTE_MODULE_PICKLED_ATTRIBUTES = ("on", "device", "is_device_map_set", "is_scriptable", "module_rref")
# Methods of nn.Module that would need the parameters here; each raises ValueError, as torch's.
_UNSUPPORTED = (
    "add_module apply bfloat16 buffers children cpu cuda double extra_repr float half ipu load_state_dict modules "
    "named_buffers named_children named_modules named_parameters register_backward_hook register_buffer "
    "register_forward_hook register_forward_pre_hook register_parameter requires_grad_ share_memory state_dict type "
    "xpu zero_grad"
)


class RemoteModule(nn.Module):
    """A module `module_cls(*args, **kwargs)` that is created on a worker and stays there; a call runs it there.

    Tensors given as arguments are moved to the module's device; without a device map results come back on the CPU.

    >>> from rpcbench.nn import RemoteModule
    >>> layer = RemoteModule("worker1", torch.nn.Linear, (4, 2))
    >>> layer(torch.zeros(3, 4)).shape, len(layer.remote_parameters())
    (torch.Size([3, 2]), 2)

    Args:
        remote_device: "worker1", "worker1/cuda:0" or "rank:1/cpu"; the module is moved to that device there.
        module_cls: a class, or a function that returns a module.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        ValueError: where remote_device cannot be parsed, and, on first use, where module_cls does not return an
            nn.Module.
        SerializationError: for arguments that cannot be sent.
    """

    is_scriptable = False

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        if _module_interface_cls is not None:
            raise NotImplementedError("TorchScript's interfaces are not supported: pass the module class alone")
        if isinstance(module_cls, nn.Module):
            raise TypeError(
                f"module_cls must create the module on the worker, as the class {type(module_cls).__name__} does; this "
                "is a module already. For one that a worker has, call RemoteModule.init_from_module_rref"
            )
        if current.find_current() is None:
            raise AssertionError(f"RemoteModule only works in RPC. {NOT_INITIALIZED}")
        on, device = _parse_device(remote_device)
        with _name_failed_call(f"the arguments of the module on {on}"):
            given = module_cls, *arguments_of(args, kwargs), device
            made = current.current_agent().create(on, _make_module, given, label="RemoteModule")
            self._init_existing(on, device, cast("RRef[Any]", made))

    @staticmethod
    def init_from_module_rref(remote_device: str, module_rref: RRef[Any]) -> RemoteModule:
        """Return a RemoteModule for a module that a worker has already.

        Args:
            remote_device: the worker and device of the module, as for the class.
            module_rref: an RRef of it.
        """
        return _make_from_existing(*_parse_device(remote_device), module_rref)

    def _init_existing(self, on: str | int, device: str, module_rref: RRef[Any]) -> None:
        super().__init__()
        self._set_location(on, device, module_rref)

    def _set_location(self, on: str | int, device: str, module_rref: RRef[Any]) -> None:
        self.on, self.device, self.module_rref = on, device, module_rref
        targets = current.current_agent().calls.values.routes.route_to(module_rref.owner().id, False).targets
        # whether calls from here to the module's worker have a device map, by which results come back
        self.is_device_map_set = bool(targets)

    # -- calls
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its worker and return its result."""
        return self.forward_async(*args, **kwargs).wait()

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the module on its worker and return a Future of its result."""
        how = (self.device, self.is_device_map_set)
        return rpc_async(self.module_rref.owner(), _run_forward, (self.module_rref, *how, args, kwargs))

    def get_module_rref(self) -> RRef[Any]:
        """Return the RRef of the module itself."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[Any]]:
        """Return an RRef of each parameter, for a DistributedOptimizer; `recurse` False: without submodules'."""
        arguments = self.module_rref.owner(), _wrap_parameters, (self.module_rref, recurse)
        rrefs: list[RRef[Any]] = current.current_agent().ask(*arguments, label="RemoteModule.remote_parameters")
        return rrefs

    def train(self, mode: bool = True) -> Self:
        """Switch the module on its worker to training mode or, with `mode` False, to evaluation mode."""
        arguments = self.module_rref.owner(), _set_train_mode, (self.module_rref, mode)
        current.current_agent().ask(*arguments, label="RemoteModule.train")
        self.training = mode
        return self

    def eval(self) -> Self:
        """Switch the module to evaluation mode, as `train(False)`."""
        return self.train(False)

    def to(self, remote_device: str, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Move the module with its parameters to another worker ("worker2" or "worker2/cuda:0"). Existing RRefs of its
        parameters still refer to the old module: request new ones. ValueError for any other argument."""
        agent = current.current_agent()
        try:
            on, device = _parse_device(remote_device)
            agent.member(on)
        except (UnknownWorkerError, TypeError, AttributeError):  # a device or a dtype, as nn.Module.to takes them
            _refuse_method("to")
        except RuntimeError as error:  # a device that torch does not know
            raise ValueError(str(error)) from error
        if args or kwargs:
            _refuse_method("to")
        moved = cast(
            "RRef[Any]", agent.create(on, _copy_to_device, (self.module_rref, device), label="RemoteModule.to")
        )
        with _name_failed_call(f"the module that should move to {on}"):
            # waits, so an error of the move is raised here
            agent.ask(on, _check_exists, (moved,), label="RemoteModule.to")
        self._set_location(on, device, moved)
        return self

    def parameters(self, recurse: bool = True) -> NoReturn:
        # torch's text: programs match it.
        raise ValueError(
            "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
        )

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )

    def __repr__(self) -> str:
        return f"RemoteModule(on {self.on}/{self.device}, {self.module_rref})"


@contextlib.contextmanager
def _name_failed_call(what: str) -> Iterator[None]:
    """Add to a pickling error which call it belongs to."""
    # The path in the error starts at the arguments of an internal call, which the user's program does not contain.
    try:
        yield
    except SerializationError as error:
        raise SerializationError(
            f"{what} cannot be sent: {error}. Make that part on the worker instead, in the module's __init__, or leave "
            "it out in __getstate__"
        ) from error


def _refuse_method(name: str) -> NoReturn:
    raise ValueError(f"Method ``{name}`` not supported for RemoteModule")


for _name in _UNSUPPORTED.split():
    setattr(
        RemoteModule, _name, functools.partialmethod(lambda self, name, *args, **kwargs: _refuse_method(name), _name)
    )


def _parse_device(remote_device: str) -> tuple[str | int, str]:
    """Return worker (a name, or the id of "rank:1") and device. ValueError, or RuntimeError for an unknown device."""
    if not isinstance(remote_device, str):
        raise TypeError(f"Invalid type for remote_device: {type(remote_device)}; it is a text such as 'worker1/cpu'")
    worker, slash, device = remote_device.partition("/")
    rank = worker.removeprefix("rank:")
    if not worker or "/" in device or (rank != worker and not rank.isdigit()):
        raise ValueError(
            f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>' or "
            "'rank:<rank>/<device>'"
        )
    return (worker if rank == worker else int(rank)), str(torch.device(device if slash else "cpu"))


def _reduce_module(module: RemoteModule) -> tuple[Callable[..., RemoteModule], tuple[Any, ...]]:
    return _make_from_existing, (module.on, module.device, module.module_rref, module.training)


register_reducer(RemoteModule, _reduce_module)  # for RPC only; `__getstate__` refuses any other pickler


def _make_from_existing(on: str | int, device: str, module_rref: RRef[Any], training: bool = True) -> RemoteModule:
    """Return a RemoteModule for an existing module, with `__init__` bypassed; messages are unpickled by it."""
    module = RemoteModule.__new__(RemoteModule)
    module._init_existing(on, device, module_rref)
    module.training = training
    return module


# -- on the worker
def _make_module(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}."
        )
    return module.to(device)


def _run_forward(
    module_rref: RRef[Any], device: str, mapped: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    module = module_rref.local_value()
    if torch.device(device).type == "cpu":
        return module(*args, **kwargs)
    # The caller's tensors may be on the CPU. Without a device map a result on another device could not be sent.
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    result = module(*args, **kwargs)
    return result if mapped else tree_map_only(torch.Tensor, torch.Tensor.cpu, result)


def _wrap_parameters(module_rref: RRef[Any], recurse: bool) -> list[RRef[Any]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _set_train_mode(module_rref: RRef[Any], mode: bool) -> None:
    module_rref.local_value().train(mode)


def _copy_to_device(module_rref: RRef[Any], device: str) -> nn.Module:
    module: nn.Module = module_rref.to_here()  # a copy; the old worker keeps its own
    return module.to(device)


def _check_exists(module_rref: RRef[Any]) -> None:
    module_rref.local_value()


_RemoteModule = RemoteModule  # torch's name, for the arguments that few programs use
