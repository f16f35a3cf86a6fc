"""RRef: a reference to a value on a worker, with the methods of torch.distributed.rpc.RRef, and a few more:
`to_here_async`, `release`, and proxies that can be called and asked for attributes.
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
from rpcbench.rpc.rref_proxy import CheckedProxy, RRefProxy, run_method, run_method_there
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import Handle, class_of, type_of
from rpcbench.runtime.members import WorkerInfo

T = TypeVar("T")


class RRef(Handle, Generic[T]):
    """A reference to a value of type T on one worker, its owner; made by `remote()`, or around a value of your own.

    It can be passed to any worker in a call. The owner keeps the value while any reference is left, anywhere.

    >>> rref = rpc.remote("worker1", dict, kwargs={"a": 1})
    >>> rref.rpc_sync().update(b=2)
    >>> rref.owner_name(), rref.to_here()
    ('worker1', {'a': 1, 'b': 2})
    """

    _agent: Agent
    _has: set[str]  # names that the value is known to have
    _asked: Future[Any] | None  # for its class

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None and not isinstance(value, torch.jit.ScriptModule):
            raise RuntimeError(
                "type_hint should only be specified when the RRef being created contains a ScriptModule. Leave it out"
            )
        agent = current.current()
        made = agent.values.keep(value)
        Handle.__init__(self, agent, made._rref, made._owner, None, made._value, made._type)
        self._has, self._asked, self._site = set(), None, made._site

    @classmethod
    def held(
        cls, agent: Agent, rref: Id, owner: int, fork: Id | None, value: Future[Any] | None, type_: str = ""
    ) -> RRef[Any]:
        """For the runtime: a reference to what is known already."""
        new = cls.__new__(cls)
        Handle.__init__(new, agent, rref, owner, fork, value, type_)
        new._has, new._asked = set(), None
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
        value = self._near()
        return self._agent.get(self, timeout) if value is None else value.wait_or_cancel()

    def to_here_async(self, timeout: float = UNSET_TIMEOUT) -> Future[T]:
        """As `to_here`, as a future."""
        value = self._near()
        return self._agent.fetch(self, timeout) if value is None else value

    def _near(self) -> Future[T] | None:
        """The value itself, where it lives here. Its error where it is known that there is none."""
        self._check_alive("to_here() on it")
        if self._value is None and (error := self._failure()) is not None:
            raise error
        return self._value

    def local_value(self) -> T:
        """The value itself, on its owner; waits until it is made. RuntimeError elsewhere."""
        self._check_alive("local_value() on it")
        if self._value is None:
            raise RuntimeError(
                f"For {self._long_name()}, can't call localValue() on user {self._here()}. Call it on owner "
                f"{self.owner()}, or use to_here() for a copy."
            )
        value: T = self._value.wait()
        return value

    # -- calls on it
    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """`rref.rpc_sync().method(*args)` runs the method on the owner and waits for what it returns.

        `rref.rpc_sync()(*args)` calls the value itself; `rref.rpc_sync().attr("name")` reads an attribute.
        """
        return RRefProxy(self, self._ask, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As `rpc_sync`, returning a Future."""
        return RRefProxy(self, self._call, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """As `rpc_sync`, returning an RRef of the result, which stays on the owner.

        AttributeError where the value has no such method; so the first call of each waits until the value is made.
        """

        def create(to: int, function: Callable[..., Any], args: Any, timeout: float) -> Handle:
            return self._agent.create(to, function, args, timeout=timeout, label=self._label(function, args))

        return CheckedProxy(self, create, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Backward from the value, a scalar tensor, over all workers of an autograd context.

        On the owner, no context is plain `.backward()`. RuntimeError on a user without a context, and for a value
        that is no tensor; else as `autograd.backward`.
        """
        if not self.is_owner():
            if dist_autograd_ctx_id == -1:
                raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            self._ask(self._owner, _backward, (self, dist_autograd_ctx_id, retain_graph), UNSET_TIMEOUT)
            return
        value: Any = self.local_value()
        if not isinstance(value, torch.Tensor):
            raise RuntimeError("RRef should contain a tensor for .backward()")
        if dist_autograd_ctx_id == -1:
            value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            backward(dist_autograd_ctx_id, [value], retain_graph)

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """The class of the value, or a Future of it; waits until the value is made, and asks only once."""
        if self._asked is None or (self._asked.done() and _failed(self._asked)):
            self._asked = self._call(self._owner, _type_of, (self,), timeout)
        return self._asked.wait() if blocking else self._asked

    def _get_future(self) -> Future[Any]:
        """Of the user that called `remote()`: done when the value is made. Else, of a value that is there: done."""
        if self._creation is not None:
            return self._creation
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    # -- inside; `to` is the owner
    def _call(self, to: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Future[Any]:
        future: Future[Any] = self._through(self._agent.call, function, args, timeout)
        return future

    def _ask(self, to: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
        return self._through(self._agent.ask, function, args, timeout)

    def _through(
        self, call: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> Any:
        label = self._label(function, args)
        if function is not run_method or self.is_owner():
            return call(self._owner, function, args, timeout=timeout, label=label)
        self._check_alive("fork an UserRRef")
        _, method, more, kwargs = args
        owner, named = self._agent.living_owner(self), (*self._rref, method, *more)
        return call(owner, run_method_there, named, kwargs, timeout=timeout, label=label, holding=(self,))

    def _label(self, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
        name = args[1] if len(args) > 1 and isinstance(args[1], str) else function.__name__.strip("_")
        return f"{class_of(self._type) or 'value'}.{name}"

    def _here(self) -> WorkerInfo:
        return WorkerInfo(self._agent.name, self._agent.id)

    def _long_name(self) -> str:
        return f"UserRRef(rref_id={_global(self._rref)}, fork_id={_global(self._fork or self._rref)})"

    def _creation_error(self) -> Exception | None:
        creation = self._creation
        if creation is None or ((known := creation.outcome()) and known[1] is None) or not creation.done():
            return None
        try:
            creation.value()
        except Exception as error:  # noqa: BLE001  (it is looked at, and raised where the value is asked for)
            return error
        return None

    def _failure(self) -> Exception | None:
        """Why there is no value. Where the answer was lost with a connection, only the owner knows."""
        error = self._creation_error()
        return None if isinstance(error, ConnectionLostError) and error.maybe_executed else error

    def _check_alive(self, use: str) -> None:
        super()._check_alive(use)
        error = self._failure()
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

    def _operate(self, *_: Any) -> NoReturn:
        """An operator of the value is none of the reference."""
        raise TypeError(
            "an RRef is no value to calculate with: use rref.to_here(), or a method of the value: "
            "rref.rpc_sync().add(1)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operate
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = _operate

    def __reduce__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def __repr__(self) -> str:
        rref = _global(self._rref)
        if self._fork is None or self.is_owner():
            return f"OwnerRRef({rref}{self._names()})"
        return f"UserRRef(RRefId = {rref}, ForkId = {_global(self._fork)}{self._names()})"

    def _names(self) -> str:
        """`, Tensor (N=32, C=3)`: more of a value than its class, where that is here or came with the reference."""
        outcome = None if self._value is None else self._value.outcome()
        type_ = self._type if outcome is None or outcome[1] is not None else type_of(outcome[0])
        return "" if type_ == class_of(type_) else f", {type_}"


def _global(id_: Id) -> str:
    return f"GloballyUniqueId(created_on={id_.worker}, local_id={id_.serial})"


def _failed(future: Future[Any]) -> bool:
    try:
        future.value()
    except Exception:  # noqa: BLE001  (whoever asked has got it)
        return True
    return False


# -- what runs on the owner
def _type_of(rref: RRef[Any]) -> type[Any]:
    return type(rref.local_value())


def _backward(rref: RRef[Any], context: int, retain_graph: bool) -> None:
    rref.backward(context, retain_graph)
