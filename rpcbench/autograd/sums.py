"""Gradients that add up over contexts: for micro-batches that each have a context of their own.

Guarantees
- Each worker adds what it holds exactly once, however many ways lead to it.
- The sum is held in a context that knows all these workers, so releasing it releases it everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rpcbench.autograd.recorder import recorder
from rpcbench.base.ids import Counter, Id

_asked = Counter()


@contextlib.contextmanager
def accumulator() -> Iterator[int]:
    """A context that is no thread's own and only holds sums of gradients; its id. Released everywhere at the end.

    >>> w = torch.ones(3, requires_grad=True)
    >>> with dist_autograd.accumulator() as total:
    ...     for factor in (1.0, 2.0):
    ...         with dist_autograd.context() as context_id:
    ...             dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, (w, factor)).sum()])
    ...             dist_autograd.accumulate(total, context_id)
    ...     dist_autograd.get_gradients(total)[w]
    tensor([3., 3., 3.])
    """
    here = recorder()
    context_id = here.new_context()
    try:
        yield context_id
    finally:
        here.release(context_id)


def accumulate(into: int, *others: int) -> None:
    """Add the gradients of other contexts to those of `into`, on all workers that hold some. The others keep theirs.

    `into` may be any context, and works with `DistributedOptimizer.step`. RuntimeError for an unknown context here; an
    error of a worker that cannot be reached is raised here.
    """
    here = recorder()
    for context_id in (into, *others):
        here.recorded(context_id)
    me = here.agent.id
    with here.inside(into):
        _add_up(Id(me, _asked.next(), here.agent.incarnation), into, others, (me,))


def _add_up(asked: Id, into: int, others: Sequence[int], told: Sequence[int]) -> None:
    """On each worker: add, and pass it on to the workers that the other contexts have come to from here."""
    here = recorder()
    if not here.first_time(into, asked):
        return
    workers: set[int] = set()
    for context_id in set(others) & set(here.contexts()):
        copies = [(leaf, gradient.clone()) for leaf, gradient in here.gradients(context_id).items()]
        here.accumulate_leaves(into, copies)
        workers |= here.known_workers(context_id)
    workers -= set(told)
    known = (*told, *workers)
    for future in [here.agent.call(worker, _add_up, (asked, into, others, known)) for worker in workers]:
        future.wait()
