"""Kinds of agents by name, as in torch.distributed.rpc.backend_registry: programs and tests may register their own.

A backend is two functions: one creates its options, the other an agent that has joined its world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

from rpcbench.rpc import constants
from rpcbench.rpc.options import RpcBackendOptions

__all__ = [
    "BackendType", "BackendValue", "backend_registered", "construct_rpc_backend_options", "init_backend",
    "register_backend",
]  # fmt: skip


class BackendValue(NamedTuple):
    """The two functions of a backend."""

    construct_rpc_backend_options_handler: Callable[..., Any]  # (rpc_timeout=, init_method=, **kwargs) -> options
    init_backend_handler: Callable[..., Any]  # (store=, name=, rank=, world_size=, rpc_backend_options=) -> agent


# Not enum.Enum, which is closed: torch builds a new Enum for each registration, so that old members match no new ones.
class _Backends(type):
    """An extensible enumeration: `BackendType.TENSORPIPE`, `BackendType["TENSORPIPE"]`, `list(BackendType)`."""

    _members: dict[str, BackendType]

    @property
    def __members__(cls) -> MappingProxyType[str, BackendType]:
        return MappingProxyType(cls._members)

    def __getitem__(cls, name: str) -> BackendType:
        return cls._members[name]

    def __getattr__(cls, name: str) -> BackendType:
        if name in cls._members:
            return cls._members[name]
        raise AttributeError(f"no RPC backend {name!r} is registered; there are: {', '.join(cls._members)}")

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(list(cls._members.values()))

    def __len__(cls) -> int:
        return len(cls._members)


class BackendType(metaclass=_Backends):
    """A registered backend: its `name`, and a BackendValue as its `value`."""

    _members: dict[str, BackendType] = {}  # of this process; filled by `register_backend`

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value
        self._members[name] = self

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> Any:  # by name, as the functions of a backend need not be picklable
        return getattr, (BackendType, self.name)


def backend_registered(backend_name: str) -> bool:
    """Return whether there is a backend of this name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Register a backend, and return it as a new member of BackendType.

    Args:
        backend_name: A name that is not taken yet.
        construct_rpc_backend_options_handler: Called with (rpc_timeout=, init_method=, **kwargs); returns options.
        init_backend_handler: Called with (store=, name=, rank=, world_size=, rpc_backend_options=); returns a running
            agent.

    Raises:
        RuntimeError: The name is taken.
    """
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    return BackendType(backend_name, value)


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Return options of a backend.

    Args:
        backend: A member of `BackendType`.
        rpc_timeout: Default timeout of calls in seconds.
        init_method: Rendezvous URL.
        **kwargs: Further options of this backend.
    """
    make = backend.value.construct_rpc_backend_options_handler
    options: RpcBackendOptions = make(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)
    return options


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> Any:
    """Return a running agent of this backend."""
    return backend.value.init_backend_handler(*args, **kwargs)
