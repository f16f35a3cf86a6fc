"""Gradient clipping by the norm over all workers, inside an autograd context."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from rpcbench.autograd import recorder
from rpcbench.base.futures import settle_all
from rpcbench.rpc import RRef, rpc_async


def clip_grad_norm_(
    context_id: int,
    params_rref: Sequence[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale the gradients of a context so that their norm, over all these parameters, is at most `max_norm`.

    Returns the norm before. As torch.nn.utils.clip_grad_norm_; parameters without a gradient count nothing.
    RuntimeError for an unknown context, and for a norm that is not finite with `error_if_nonfinite`.
    """
    owners: dict[int, list[RRef[Any]]] = defaultdict(list)
    for rref in params_rref:
        owners[rref.owner().id].append(rref)
    norms = settle_all([rpc_async(owner, _norm, (context_id, rrefs, norm_type)) for owner, rrefs in owners.items()])
    total = total_norm(norms, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total}, so they cannot be clipped")
    factor = clip_factor(total, max_norm)
    if not factor >= 1:
        settle_all([rpc_async(owner, _scale, (context_id, rrefs, factor)) for owner, rrefs in owners.items()])
    return total


def local_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> float:
    """The norm of gradients of one worker, seen as one vector."""
    norms = [torch.linalg.vector_norm(_values(gradient), norm_type).double().cpu() for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0


def total_norm(norms: Sequence[float], norm_type: float) -> float:
    """The norm over all workers, from those of each."""
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.double), norm_type)) if norms else 0.0


def clip_factor(total: float, max_norm: float) -> float:
    """What to scale gradients of this norm by, where it is below 1: as torch does."""
    return max_norm / (total + 1e-6)


# -- on the owners
def _norm(context_id: int, rrefs: list[RRef[Any]], norm_type: float) -> float:
    gradients = recorder().gradients(context_id)
    return local_norm([gradients[param] for rref in rrefs if (param := rref.local_value()) in gradients], norm_type)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _scale(context_id: int, rrefs: list[RRef[Any]], factor: float) -> None:
    recorder().scale(context_id, [rref.local_value() for rref in rrefs], factor)
