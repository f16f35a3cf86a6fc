"""RRef: a reference to a value on a worker, with the methods of torch.distributed.rpc.RRef and a few more.

The additions are `to_here_async`, `release`, and proxies that call the value itself or read its attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

import torch

from rpcbench.autograd import backward
from rpcbench.base.config import UNSET_TIMEOUT
from rpcbench.base.errors import ConnectionLostError, RpcTimeoutError
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id
from rpcbench.rpc.rref_proxy import RRefProxy, check_method, run_method, run_method_there
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import RRefHandle, class_of, type_of
from rpcbench.runtime.members import WorkerInfo

T = TypeVar("T")


class RRef(RRefHandle, Generic[T]):
    """A reference to a value of type T on one worker, its owner; created by `remote()`, or from a local value.

    It can be passed to any worker in a call. The owner keeps the value as long as any worker holds a reference.

    >>> rref = rpc.remote("worker1", dict, kwargs={"a": 1})
    >>> rref.rpc_sync().update(b=2)
    >>> rref.owner_name(), rref.to_here()
    ('worker1', {'a': 1, 'b': 2})
    """

    _agent: Agent
    _confirmed_names: set[str]  # attributes that the owner has confirmed for `remote()`
    _class_request: Future[Any] | None  # the request for the value's class

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule):
            raise RuntimeError(
                "type_hint should only be specified when the RRef being created contains a ScriptModule. Leave it out"
            )
        agent = current.current_agent()
        made = agent.calls.values.make_owner_handle(value)
        RRefHandle.__init__(self, agent, made._rref, made._owner, None, made._value, made._type)
        self._confirmed_names, self._class_request, self._site = set(), None, made._site

    @classmethod
    def from_existing(
        cls, agent: Agent, rref: Id, owner: int, fork: Id | None, value: Future[Any] | None, type_: str = ""
    ) -> RRef[Any]:
        """For the runtime: return a reference with an id that exists already."""
        new = cls.__new__(cls)  # not __init__, which would register a new value
        RRefHandle.__init__(new, agent, rref, owner, fork, value, type_)
        new._confirmed_names, new._class_request = set(), None
        return new

    # -- the owner
    def is_owner(self) -> bool:
        """Return whether the value is stored in this process."""
        return self._owner == self._agent.id

    def owner(self) -> WorkerInfo:
        """Return the worker that stores the value."""
        return self._agent.member(self._owner)

    def owner_name(self) -> str:
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has registered this reference and created its value; True on the owner itself."""
        if self.is_owner():
            return True
        created = self._creation is None or (self._creation.done() and self._creation_error() is None)
        return created and self._agent.calls.values.is_confirmed(self._fork)

    # -- the value
    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """Wait for the value and return a copy of it, or on the owner the value itself. Every call fetches again.

        Raises the error of the function that was to create it; RpcTimeoutError after `timeout` seconds;
        WorkerLostError where the owner is lost.
        """
        value = self._local_future()
        return self._agent.get(self, timeout) if value is None else value.wait_or_cancel()

    def to_here_async(self, timeout: float = UNSET_TIMEOUT) -> Future[T]:
        """Return a Future of the result of `to_here`."""
        value = self._local_future()
        return self._agent.fetch(self, timeout) if value is None else value

    def _local_future(self) -> Future[T] | None:
        """Return the future of a value that is stored here, else None. Raises the known error of a failed creation."""
        self._check_alive("to_here() on it")
        if self._value is None and (error := self._known_failure()) is not None:
            raise error
        return self._value

    def local_value(self) -> T:
        """Wait for the value and return it itself; only on its owner. Raises RuntimeError on other workers."""
        self._check_alive("local_value() on it")
        if self._value is None:
            raise RuntimeError(
                f"For UserRRef(rref_id={_format_global_id(self._rref)}, "
                f"fork_id={_format_global_id(self._fork or self._rref)}), can't call "
                f"localValue() on user {WorkerInfo(self._agent.name, self._agent.id)}. Call it on owner "
                f"{self.owner()}, or use to_here() for a copy."
            )
        value: T = self._value.wait()
        return value

    # -- calls on it
    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy: `rref.rpc_sync().method(*args)` runs the method on the owner and returns its result.

        `rref.rpc_sync()(*args)` calls the value itself; `rref.rpc_sync().attr("name")` reads an attribute.
        """
        return RRefProxy(self, self._call_and_wait, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy as `rpc_sync` does, for calls that return a Future."""
        return RRefProxy(self, self._call_owner, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """Return a proxy as `rpc_sync` does, for calls that leave the result on the owner and return an RRef of it.

        Such a call raises AttributeError where the value has no such method; so the first call of each method waits
        until the value is created.
        """

        def create_remote(to: int, function: Callable[..., Any], args: Any, timeout: float) -> RRefHandle:
            # Without the check a misspelt name would raise only where the RRef of the result is used.
            if args[1] not in self._confirmed_names:
                self._call_and_wait(to, check_method, args[:2], timeout)
                self._confirmed_names.add(args[1])
            return self._agent.create(to, function, args, timeout=timeout, label=self._make_label(function, args))

        return RRefProxy(self, create_remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the value, a scalar tensor, over all workers of an autograd context.

        Args:
            dist_autograd_ctx_id: Id of the context; -1, on the owner only: run the value's own `.backward()`.
            retain_graph: Keep the graph for another pass.

        Raises:
            RuntimeError: No context on a user, or the value is not a tensor; else as `autograd.backward`.
        """
        if not self.is_owner():
            if dist_autograd_ctx_id == -1:
                raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            self._call_and_wait(self._owner, _run_backward, (self, dist_autograd_ctx_id, retain_graph), UNSET_TIMEOUT)
            return
        value: Any = self.local_value()
        if not isinstance(value, torch.Tensor):
            raise RuntimeError("RRef should contain a tensor for .backward()")
        if dist_autograd_ctx_id == -1:
            value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            backward(dist_autograd_ctx_id, [value], retain_graph)

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """Return the class of the value, or a Future of it."""
        # One request serves all later calls, unless it failed: a timeout must not be final.
        if self._class_request is None or (self._class_request.done() and _has_failed(self._class_request)):
            self._class_request = self._call_owner(self._owner, _type_of, (self,), timeout)
        return self._class_request.wait() if blocking else self._class_request

    def _get_future(self) -> Future[Any]:
        """Return a future that is done when the value has been created; at once unless `remote()` made this RRef."""
        if self._creation is not None:
            return self._creation
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    # -- internals. `to` is always the owner: the proxies pass it as `rpc_api` of torch requires.
    def _call_owner(
        self, to: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, label: str = ""
    ) -> Future[Any]:
        future: Future[Any] = self._call_through(self._agent.call, function, args, timeout, label)
        return future

    def _call_and_wait(self, to: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
        return self._call_through(self._agent.ask, function, args, timeout)

    def _call_through(
        self,
        call: Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        label: str = "",
    ) -> Any:
        label = label or self._make_label(function, args)
        if function is not run_method or self.is_owner():
            return call(self._owner, function, args, timeout=timeout, label=label)
        self._check_alive("fork an UserRRef")
        # The owner gets the RRef's id, not a fork of it: `holding` keeps this reference alive until the reply, which
        # saves the messages of a fork.
        _, method, more, kwargs = args
        owner, named = self._agent.living_owner(self), (*self._rref, method, *more)
        return call(owner, run_method_there, named, kwargs, timeout=timeout, label=label, holding=(self,))

    def _make_label(self, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
        name = args[1] if len(args) > 1 and isinstance(args[1], str) else function.__name__.strip("_")
        return f"{class_of(self._type) or 'value'}.{name}"

    def _creation_error(self) -> Exception | None:
        creation = self._creation
        # `outcome` first: it is an attribute read, and this runs before each use of the RRef.
        if creation is None or ((known := creation.known_outcome()) and known[1] is None) or not creation.done():
            return None
        try:
            creation.value()
        except Exception as error:  # noqa: BLE001  (returned; a use of the value raises it)
            return error
        return None

    def _known_failure(self) -> Exception | None:
        """Return the reason that there is no value, as far as this process can know it."""
        # Where the reply was lost with a connection, the function may have run, so the owner may have the value.
        error = self._creation_error()
        return None if isinstance(error, ConnectionLostError) and error.maybe_executed else error

    def _check_alive(self, use: str) -> None:
        super()._check_alive(use)
        error = self._known_failure()
        if error is None:
            return
        if isinstance(error, RpcTimeoutError):
            raise RpcTimeoutError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does "
                "not exist."
            ) from error
        if isinstance(error, ConnectionLostError):
            text = f"RRef creation via rpc.remote() failed: {error}"
            raise ConnectionLostError(text, error.maybe_executed) from error

    def __getattr__(self, name: str) -> Any:
        dunder = name.startswith("__")
        hint = "" if dunder else f"; of the value: rref.rpc_sync().{name}(…), or rref.to_here().{name}"
        raise AttributeError(f"an RRef has no attribute {name!r}{hint}", name=name, obj=self)

    def _refuse_operator(self, *_: Any) -> NoReturn:
        """Raise TypeError with a hint: the operators of the value are not those of the reference."""
        raise TypeError(
            "an RRef supports no arithmetic: use rref.to_here(), or a method of the value: rref.rpc_sync().add(1)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_operator
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = _refuse_operator

    def __reduce__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __repr__(self) -> str:
        rref = _format_global_id(self._rref)
        if self._fork is None or self.is_owner():
            return f"OwnerRRef({rref}{self._type_detail()})"
        return f"UserRRef(RRefId = {rref}, ForkId = {_format_global_id(self._fork)}{self._type_detail()})"

    def _type_detail(self) -> str:
        """Return `, Tensor (N=32, C=3)`, if more is known than the class: from the value, or sent with the RRef."""
        outcome = None if self._value is None else self._value.known_outcome()
        type_ = self._type if outcome is None or outcome[1] is not None else type_of(outcome[0])
        return "" if type_ == class_of(type_) else f", {type_}"


def _format_global_id(id_: Id) -> str:
    return f"GloballyUniqueId(created_on={id_.worker}, local_id={id_.serial})"


def _has_failed(future: Future[Any]) -> bool:
    try:
        future.value()
    except Exception:  # noqa: BLE001  (the caller that made the request has received the error)
        return True
    return False


# -- functions that run on the owner
def _type_of(rref: RRef[Any]) -> type[Any]:
    return type(rref.local_value())


def _run_backward(rref: RRef[Any], context: int, retain_graph: bool) -> None:
    rref.backward(context, retain_graph)
