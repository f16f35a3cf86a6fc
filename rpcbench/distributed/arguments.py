"""The arguments of the functions here: the orders of torch.distributed 0.4 beside those of today, ranks, and seconds.

Guarantees
- Positional arguments in the order of 0.4 and of today both work. They are told apart by their types, here alone.
- A rank is a number in the world (`src`, `dst`) or a position in a group (`group_src`, `group_dst`). One that is in no
  group, both at once, or none where one is needed, is a fault in words: the other ranks learn it, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from rpcbench.base.errors import CollectiveError

R = TypeVar("R")
NO_RANK = -1
"""The rank where a fault has left none."""


def older_order(at: int, *names: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let a function take its positional arguments in an older order, too: one with an int at position `at`.

    Args:
        at: The first position where the two orders differ. In today's order no int stands there.
        names: The older order from there on.
    """

    def decorated(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def either(*args: object, **given: object) -> R:
            if len(args) <= at or not isinstance(args[at], int):
                return function(*args, **given)
            return function(*args[:at], **_named(function.__name__, names, args[at:], given))

        return either

    return decorated


def _named(
    function: str, names: Sequence[str], args: Sequence[object], given: dict[str, object]
) -> dict[str, object]:
    """Return all these arguments by name. Raises TypeError for too many, or for one that is given twice."""
    if len(args) > len(names):
        raise TypeError(f"{function}() takes at most {', '.join(names)} after its first arguments in the older order")
    named = dict(zip(names, args, strict=False))
    if twice := named.keys() & given.keys():
        raise TypeError(f"{function}() got {', '.join(sorted(twice))} twice")
    return named | given


def chosen_rank(
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
        return given, stranger(ranks, given)
    if not 0 <= given < len(ranks):
        return NO_RANK, f"group_{name}={given} is not in the group, which has ranks 0 to {len(ranks) - 1}"
    return ranks[given], ""


def stranger(ranks: Sequence[int], rank: int) -> str:
    """Return that a rank of the world is not in the group; "" if it is."""
    return "" if rank in ranks else f"rank {rank} is not in the group of ranks {list(ranks)}"


def seconds_of(timeout: float | timedelta | None) -> float | None:
    """Return a timeout in seconds, None for None. Raises CollectiveError for one that is not positive."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise CollectiveError(f"timeout={timeout!r}: pass a positive number of seconds, or a timedelta")
    return seconds
