"""Optimizers for parameters on many workers: a drop-in for `torch.distributed.optim.DistributedOptimizer`."""

from __future__ import annotations

from rpcbench.optim.distributed import DistributedOptimizer, DistributedScheduler, clip_grad_norm_
from rpcbench.optim.local import LocalOptimizer

__all__ = ["DistributedOptimizer", "DistributedScheduler", "LocalOptimizer", "clip_grad_norm_"]
