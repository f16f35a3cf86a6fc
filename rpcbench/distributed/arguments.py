"""The arguments of the functions here: their help, the orders of torch.distributed 0.4, ranks, and seconds.

Guarantees
- What many functions have in common is described here, once. The help of each function is complete nevertheless, and
  type checkers see the signatures in the source.
- Positional arguments in the order of 0.4 and of today both work. They are told apart by their types, here alone.
- A rank is a number in the world (`src`, `dst`) or a position in a group (`group_src`, `group_dst`). One that is in no
  group, both at once, or none where one is needed, is a fault in words: the other ranks learn it, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

from rpcbench.base.errors import CollectiveError

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., object])
NO_RANK = -1
"""The rank where a fault has left none."""


ARGUMENTS = {
    "src": "Source, as a rank of the world.",
    "dst": "Destination, as a rank of the world.",
    "op": "The reduce op.",
    "group": "By default all ranks.",
    "async_op": "Whether to return at once, with a Work.",
    "timeout": "Seconds for this wait; None: those of the group. After it the process group is over.",
    "tag": "A number from 0; a receive gets only messages of its tag.",
    "group_src": "Source, as a position in the group, in place of `src`.",
    "group_dst": "Destination, as a position in the group, in place of `dst`.",
}
"""The arguments that have one meaning in all functions that `complete_help` marks."""
_WORK = """Returns:
    None; with `async_op` a Work, whose `wait` raises the errors."""
_ERRORS = """Raises:
    CollectiveError: The calls of the ranks differ, or one is invalid; the group stays usable. Or, as the following
        errors, the world is broken.
    RpcTimeoutError: A rank has not come in time.
    WorkerLostError: A rank has ended."""


def complete_help(function: F) -> F:
    """Add to a function's docstring the common arguments, the result of `async_op` and the errors; return it."""
    function.__doc__ = f"{inspect.getdoc(function)}\n\n{common_help(inspect.signature(function).parameters)}"
    return function


def common_help(names: Iterable[str]) -> str:
    """Return the description of those of these parameters that are common, of the result and of the errors."""
    arguments = "\n".join(["Args:", *(f"    {name}: {ARGUMENTS[name]}" for name in names if name in ARGUMENTS)])
    return "\n\n".join([arguments, *([_WORK] if "async_op" in names else []), _ERRORS])


def accept_older_order(at: int, *names: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let a function take its positional arguments in an older order, too: one with an int at position `at`.

    Args:
        at: The first position where the two orders differ. In today's order no int stands there.
        names: The older order from there on.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def take_either(*args: object, **given: object) -> R:
            if len(args) <= at or not isinstance(args[at], int):
                return function(*args, **given)
            return function(*args[:at], **_name_arguments(function.__name__, names, args[at:], given))

        return take_either

    return decorate


def _name_arguments(
    function: str, names: Sequence[str], args: Sequence[object], given: dict[str, object]
) -> dict[str, object]:
    """Return all these arguments by name. Raises TypeError for too many, or for one that is given twice."""
    if len(args) > len(names):
        raise TypeError(f"{function}() takes at most {', '.join(names)} after its first arguments in the older order")
    named = dict(zip(names, args, strict=False))
    if twice := named.keys() & given.keys():
        raise TypeError(f"{function}() got {', '.join(sorted(twice))} twice")
    return named | given


def choose_rank(
    ranks: Sequence[int], rank: object, group_rank: object, name: str, default: int | None = None
) -> tuple[int, str]:
    """Return the rank of the world that a call means, and the fault; "" if it has none.

    Args:
        ranks: Those of the group.
        rank: The argument `name`, a rank of the world, or None.
        group_rank: The argument `group_` + `name`, a position in the group, or None.
        name: "src", "dst" or "peer".
        default: The rank where both are None; None: one of them must be given.
    """
    if rank is not None and group_rank is not None:
        return NO_RANK, f"pass {name} or group_{name}, not both"
    given = rank if group_rank is None else group_rank
    given = default if given is None else given
    if given is None:
        return NO_RANK, f"pass {name}, a rank of the world, or group_{name}"
    if not isinstance(given, int) or isinstance(given, bool):
        return NO_RANK, f"{name} is a rank, not {type(given).__name__}"
    if group_rank is None:
        return given, rank_fault(ranks, given)
    if not 0 <= given < len(ranks):
        return NO_RANK, f"group_{name}={given} is not in the group, which has ranks 0 to {len(ranks) - 1}"
    return ranks[given], ""


def rank_fault(ranks: Sequence[int], rank: int) -> str:
    """Return that a rank of the world is not in the group; "" if it is."""
    return "" if rank in ranks else f"rank {rank} is not in the group of ranks {list(ranks)}"


def timeout_seconds(timeout: float | timedelta | None) -> float | None:
    """Return a timeout in seconds, None for None. Raises CollectiveError for one that is not positive."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise CollectiveError(f"timeout={timeout!r}: pass a positive number of seconds, or a timedelta")
    return seconds
