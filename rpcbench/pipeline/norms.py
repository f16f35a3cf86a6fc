"""The norm of all gradients of a step, over all stages, and clipping by it: as torch.nn.utils.clip_grad_norm_.

Workers send their norms, never gradients. A parameter counts once, however many stages have a copy of it.
"""

from __future__ import annotations

from rpcbench.autograd import recorder
from rpcbench.base.errors import PipelineError
from rpcbench.optim.clip import clip_factor, local_norm, total_norm
from rpcbench.pipeline.crew import Crew
from rpcbench.pipeline.stage import StageWorker


def grad_norm(crew: Crew, context: int, norm_type: float) -> float:
    """The norm of all gradients in the context, seen as one vector."""
    return total_norm(crew.on_row(_norm, context, norm_type), norm_type)


def clip(crew: Crew, context: int, max_norm: float, norm_type: float) -> float:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before. PipelineError for a bad bound."""
    if not max_norm > 0:
        raise PipelineError(f"max_norm must be a positive number, not {max_norm!r}")
    norm = grad_norm(crew, context, norm_type)
    factor = clip_factor(norm, max_norm)
    if not factor >= 1:  # not a number, too: all gradients become that, as with torch, and the norm says so
        crew.scale(context, factor)
    return norm


def _norm(own: StageWorker, context: int, norm_type: float) -> float:
    held = recorder().gradients(context)
    params = dict.fromkeys(param for module in own.modules.values() for param in module.parameters())
    return local_norm([held[p] for p in params if p in held and not own.copies.repeats(p)], norm_type)
