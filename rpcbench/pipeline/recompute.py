"""Which forwards are computed once more for their backward, so that activations need not be kept until then.

`recompute` of a pipeline is "none", "all", "except_last" (all micro-batches but the last, whose backward follows soon)
or a function (stage, microbatch) -> bool. It only inserts ops; a schedule may have them itself.
"""

from __future__ import annotations

from collections.abc import Callable

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.ops import Kind, Op, Ops

Recompute = str | Callable[[int, int], bool]


def with_recompute(ops: Ops, recompute: Recompute, microbatches: int) -> Ops:
    """The same ops, with an R right before each backward that is meant. PipelineError for other words."""
    wanted = _wanted(recompute, microbatches)
    return [[each for op in own for each in _before(op, wanted)] for own in ops]


def _before(op: Op, wanted: Callable[[int, int], bool]) -> list[Op]:
    if op.kind in (Kind.BACKWARD, Kind.INPUT) and wanted(op.stage, op.microbatch):
        return [Op(op.stage, Kind.RECOMPUTE, op.microbatch), op]
    return [op]


def _wanted(recompute: Recompute, microbatches: int) -> Callable[[int, int], bool]:
    if callable(recompute):
        return recompute
    words: dict[str, Callable[[int, int], bool]] = {
        "none": lambda stage, microbatch: False,
        "all": lambda stage, microbatch: True,
        "except_last": lambda stage, microbatch: microbatch < microbatches - 1,
    }
    if not isinstance(recompute, str) or recompute not in words:
        raise PipelineError(
            f"unknown recompute {recompute!r}; there are {', '.join(map(repr, words))}, or a function of stage and "
            "micro-batch that says True or False"
        )
    return words[recompute]
