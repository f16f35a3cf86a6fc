"""What workers change in torch.distributed: how the ranks of its process groups meet, and how long a group lives.

torch calls a handler for the scheme of each init method. Workers have handlers of their own for "env" and "tcp", by
which libraries found groups, too (device meshes, Accelerate, Lightning). Guarantees
- Ranks meet as those of `rpcbench.distributed` do: Ctrl-C ends the wait, and so do the loss of a worker that has a rank
  and has not come, and a change of the cluster. The error names the worker.
- The store listens on the address of the init method only, and serves any number of groups in turn.
- Any backend works: once all ranks have come, torch has a plain store of its own, with a connection of its own.
- A process that a worker has forked or started has torch's handlers.
- A model of DistributedDataParallel may end after its group, in any thread, any number of times.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as c10d
from torch._C._distributed_c10d import Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from rpcbench.runtime import current

_GROUP = "torch"  # the name under which ranks meet, apart from those of `rpcbench.distributed`
Place = tuple[Store, int, int]
"""The store where ranks have met, the rank of this process, and the number of ranks."""


def adapt_torch() -> None:
    """Make the changes in this process, once."""
    for scheme in ("env", "tcp"):
        if not isinstance(of_torch := _rendezvous_handlers[scheme], partial):
            _rendezvous_handlers[scheme] = partial(_meet_ranks, of_torch)
    for name in ("Reducer", "Logger"):
        if not isinstance(of_torch := getattr(c10d, name), partial):
            setattr(c10d, name, partial(_make_outlived, of_torch))


def _meet_ranks(
    of_torch: Callable[..., Iterator[Place]], url: str, timeout: timedelta = default_pg_timeout, **how: Any
) -> Iterator[Place]:
    """Yield the place where all ranks have come, once. `timeout`: for the wait, and for those of torch later."""
    if current.find_current() is None:  # a forked process has no agent
        yield from of_torch(url, timeout=timeout, **how)
        return
    with _uncounted_failure():  # first: the import takes a while, and the stop button may be pressed meanwhile
        from rpcbench.distributed import stores, world  # here: workers that found no group need not load it

        place = stores.parse_init_method(url, -1, -1)
        with world.convert_store_errors(place):
            met = world.meet_all_ranks(place, _GROUP, timeout.total_seconds())
            # A copy: torch's waits for a key hold the connection, and their timeouts are those of torch.
            store = met.store.clone()  # type: ignore[attr-defined]
    yield store, met.rank, len(met.ranks)
    raise RuntimeError(f"the ranks have met at {url}, and torch cannot let them meet there again")


@contextlib.contextmanager
def _uncounted_failure() -> Iterator[None]:
    """Reset torch's number of groups after an error: it has counted one that it has not made, and the number becomes
    the name of the next group, which must be the same on all ranks."""
    try:
        yield
    except BaseException:
        if not c10d.is_initialized():
            c10d.distributed_c10d._world.group_count = 0
        raise


# The Logger of a DDP model holds its Reducer in C++, and the Reducer the process group. If that is the last reference,
# the group ends in the Reducer's destructor, which keeps Python's lock while it joins gloo's thread; and that thread
# may need the lock to end. The last reference of Python, by contrast, ends a group without the lock.
def _make_outlived(of_torch: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Make torch's object; the group or Reducer that it is made with lives at least until its destructor has run."""
    made = of_torch(*args, **how)
    for each in (*args, *how.values()):
        if isinstance(each, c10d.ProcessGroup) or type(each).__name__ == "Reducer":
            # pybind11 calls it after the destructor.
            weakref.finalize(made, _drop_reference, each).atexit = False
    return made


def _drop_reference(_: object) -> None:
    """Take the last reference, which ends with this call's arguments."""
