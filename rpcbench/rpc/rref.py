"""RRef: a reference to a value on a worker, with the methods of torch.distributed.rpc.RRef."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.agent.handles import Handle
from rpcbench.agent.roster import WorkerInfo
from rpcbench.agent.serve import ASYNC_MARK, Later
from rpcbench.words.config import UNSET_TIMEOUT
from rpcbench.words.errors import RpcTimeoutError
from rpcbench.words.futures import Future
from rpcbench.words.ids import Id

T = TypeVar("T")


class RRef(Handle, Generic[T]):
    """A reference to a value of type T on one worker, its owner; made by `remote()`, or around a value of your own.

    It can be passed to any worker in a call. The owner keeps the value while any reference is left, anywhere.
    """

    _agent: Agent

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = current.current()
        made = agent.values.keep(value, type(value).__name__)
        Handle.__init__(self, agent, made._rref, made._owner, None, made._value, made._type)

    @classmethod
    def held(
        cls, agent: Agent, rref: Id, owner: int, fork: Id | None, value: Future[Any] | None, type_: str = ""
    ) -> RRef[Any]:
        """For the runtime: a reference to what is known already."""
        new = cls.__new__(cls)
        Handle.__init__(new, agent, rref, owner, fork, value, type_)
        return new

    # -- who has it
    def is_owner(self) -> bool:
        """Whether the value lives in this process."""
        return self._owner == self._agent.id

    def owner(self) -> WorkerInfo:
        """The worker where the value lives."""
        return self._agent.member(self._owner)

    def owner_name(self) -> str:
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Owner: True. User: whether the owner knows of this reference and its value has been made."""
        if self.is_owner():
            return True
        created = self._creation is None or (self._creation.done() and self._creation_error() is None)
        return created and self._agent.values.confirmed(self._fork)

    # -- the value
    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """A copy of the value (on the owner: the value itself); waits until it is made.

        Raises the error of the function that was to make it; RpcTimeoutError after `timeout` seconds;
        WorkerLostError where the owner is gone. Every call fetches again.
        """
        return self.to_here_async(timeout).wait_or_cancel()

    def to_here_async(self, timeout: float = UNSET_TIMEOUT) -> Future[T]:
        """As `to_here`, as a future."""
        if self._value is not None:
            return self._value
        self._raise_failed_creation()
        return self._agent.fetch(self, timeout)

    def local_value(self) -> T:
        """The value itself, on its owner; waits until it is made. RuntimeError elsewhere."""
        if self._value is None:
            raise RuntimeError(
                f"For {self}, can't call local_value() on user {self._agent.name}: the value lives on "
                f"{self.owner_name()}. Use to_here() for a copy."
            )
        value: T = self._value.wait()
        return value

    # -- calls on it
    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """`rref.rpc_sync().method(*args)` runs the method on the owner and waits for what it returns."""
        return _Proxy(self, lambda call: self._call(call, timeout).wait_or_cancel())

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As `rpc_sync`, returning a Future."""
        return _Proxy(self, lambda call: self._call(call, timeout))

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As `rpc_sync`, returning an RRef of the result, which stays on the owner."""
        return _Proxy(self, lambda call: self._agent.create(self._owner, _on_owner, call, timeout=timeout))

    # -- inside
    def _call(self, call: tuple[Any, ...], timeout: float) -> Future[Any]:
        return self._agent.call(self._owner, _on_owner, call, timeout=timeout)

    def _creation_error(self) -> Exception | None:
        if self._creation is None or not self._creation.done():
            return None
        try:
            self._creation.value()
        except Exception as error:  # noqa: BLE001  (it is looked at, and raised where the value is asked for)
            return error
        return None

    def _raise_failed_creation(self) -> None:
        error = self._creation_error()
        if isinstance(error, RpcTimeoutError):
            raise RpcTimeoutError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does "
                "not exist."
            ) from error
        if error is not None:
            raise error

    def __reduce__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __repr__(self) -> str:
        rref = _global(self._rref)
        if self._fork is None or self.is_owner():
            return f"OwnerRRef({rref})"
        return f"UserRRef(RRefId = {rref}, ForkId = {_global(self._fork)})"


def _global(id_: Id) -> str:
    return f"GloballyUniqueId(created_on={id_.worker}, local_id={id_.serial})"


class _Proxy:
    """Methods of the value, called on its owner."""

    def __init__(self, rref: RRef[Any], send: Callable[[tuple[Any, ...]], Any]) -> None:
        self._rref = rref
        self._send = send

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._send((self._rref, method, args, kwargs))


def _on_owner(rref: RRef[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs on the owner: call a method of the value."""
    function = getattr(rref.local_value(), method)
    result = function(*args, **kwargs)
    return Later(result) if getattr(function, ASYNC_MARK, None) is not None else result
