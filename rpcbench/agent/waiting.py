"""Calls of this member that wait for their answers: one future each, resolved once; and their deadlines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from rpcbench.agent import sites
from rpcbench.agent.deadlines import Deadlines
from rpcbench.agent.turns import Turn
from rpcbench.words.changes import Changes
from rpcbench.words.config import UNSET_TIMEOUT
from rpcbench.words.futures import Answer, Future, HelpAlong, Kept, Later
from rpcbench.words.ids import OWN, Counter


class Waiting:
    """`first`: the number of the first call. It differs between incarnations, as a call may outlive its caller."""

    def __init__(
        self, first: int, later: Later, cancel: Callable[[int], None], on_long: Callable[[float], object]
    ) -> None:
        self.deadlines = Deadlines()
        self._later = later
        self._cancel = cancel
        self._on_long = on_long
        self._numbers, self._own_numbers = Counter(first), Counter(first | OWN)
        self._idle = Changes()
        self._futures: dict[int, Future[Any] | Turn] = {}

    def number(self, own: bool = False) -> int:
        """A new call's, which tells whether it is the bench's `own`."""
        return self._own_numbers.next() if own else self._numbers.next()

    def promise(self, number: int, help_along: HelpAlong | None = None, keeps: Sequence[Kept] = ()) -> Future[Any]:
        """The future of a call. `help_along`: see there; `keeps`: what the call needs until it is answered."""
        future = self._futures[number] = self.future(number, help_along)
        future.keeps = keeps
        return future

    def turn(self, number: int, make: Callable[[int], Future[Any]], keeps: Sequence[Kept]) -> Turn:
        """As `promise`, for a call whose caller does nothing but wait."""
        turn = self._futures[number] = Turn(number, make, keeps)
        return turn

    def future(self, number: int, help_along: HelpAlong | None) -> Future[Any]:
        """One of a call, which is not known as its own."""
        future: Future[Any] = Future(
            on_cancel=partial(self._cancel, number), on_long=self._on_long, help_along=help_along
        )
        future.site = sites.here()
        return future

    def finish(self, number: int, answer: Answer, lazy: bool = True) -> None:
        """The answer has come, or there will be none and `answer` raises why. Not `lazy`: it is to be opened even if
        nobody asks for it."""
        self.deadlines.clear(number)
        futures = self._futures
        future = futures.pop(number, None)
        if not futures:
            self._idle.tell()
        if future is None:
            return
        keeps = future.keeps
        if keeps:
            future.keeps = ()
        future.deliver(answer, self._later, lazy)
        for kept in keeps:
            kept.let_go()

    def asked(self, number: int) -> Future[Any] | Turn | None:
        """What waits for the answer to a call."""
        return self._futures.get(number)

    def keeping(self, kept: Kept) -> bool:
        """Whether any call that waits keeps this."""
        return any(one is kept for future in list(self._futures.values()) for one in future.keeps)

    def due(self) -> bool:
        """Whether any call waits."""
        return bool(self._futures)

    def fail(self, number: int, error: Exception) -> None:
        def answer() -> None:
            raise error

        self.finish(number, answer)

    def fail_all(self, error: Exception) -> None:
        for number in list(self._futures):
            self.fail(number, error)

    def number_of(self, future: Future[Any]) -> int | None:
        """The call that this is the future of, while it waits."""
        return next((number for number, other in self._futures.copy().items() if other.follows(future)), None)

    def settle(self, timeout: float | None) -> int:
        """Wait until no call waits, `timeout` seconds at most; how many still do."""
        self._idle.wait_for(lambda: not self._futures, timeout)
        return len(self._futures)


def label_of(function: Any) -> str:
    """A short name for a function, for errors and pictures."""
    if type(function) is FunctionType:
        return function.__qualname__
    if type(function) is BuiltinFunctionType:  # what torch's __qualname__ says is a class that nobody knows
        return f"torch.{function.__name__}" if function.__module__ == "torch" else function.__qualname__
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.name)  # what its __qualname__ says is its class
    names = (getattr(function, attribute, None) for attribute in ("__qualname__", "__name__", "original_name"))
    return next((name for name in names if name and isinstance(name, str)), type(function).__name__)


def arguments_of(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of a call; None for none. TypeError for what cannot be any: a forgotten comma."""
    if args is not None and not isinstance(args, tuple | list):
        raise TypeError(f"args is a tuple or list of arguments, not {_a(args)}; for one argument write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs is a dict of named arguments, not {_a(kwargs)}")
    return tuple(args or ()), kwargs or {}


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def seconds_of(timeout: float, default: float) -> float | None:
    """A timeout as torch counts it: -1 the default, 0 none. ValueError for another negative number."""
    if timeout == UNSET_TIMEOUT:
        timeout = default
    if timeout < 0:
        raise ValueError(f"a timeout is a number of seconds, 0 for none, or -1 for the default; not {timeout}")
    return timeout or None
