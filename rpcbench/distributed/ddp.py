"""DistributedDataParallel's all-reduces, told of as other collectives are: a hook of torch's own for what it does with
gradients, which does what it does without one.
"""

# torch reads the annotations of a hook and wants types, so these are no strings here.

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from rpcbench.distributed import backends, groups
from rpcbench.distributed.groups import AnyGroup
from rpcbench.distributed.told import Part


def ddp_all_reduce(group: AnyGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    """`model.register_comm_hook(None, rpcbench.distributed.ddp_all_reduce)`: panels and timelines show its all-reduces.

    group: that of the DistributedDataParallel, None for the default one. Gradients are what they are without it.
    CollectiveError where this rank is not in the group.
    """
    end, flat = groups.member(group), bucket.buffer()
    entered = end.enter("all_reduce(AVG)", backends.layout(flat), flat.nbytes)
    try:
        future = allreduce_hook(end.group, bucket)
    except BaseException:
        entered.leave(failed=True)
        raise
    return future.then(lambda done: _left(done, entered))


def _left(done: Future[torch.Tensor], entered: Part) -> torch.Tensor:
    with entered:
        return done.value()
