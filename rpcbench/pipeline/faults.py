"""What goes wrong in a user's stage or loss, in words: which operation it was, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rpcbench.base.errors import PipelineError
from rpcbench.base.rebuild import add_note
from rpcbench.pipeline.ops import Kind, Op
from rpcbench.runtime.handles import layout_of

IN_PLACE = (
    "a stage changes in place what it takes, which the stage before and the backward need as it was: let its first "
    "module do that out of place, or cut the model elsewhere (balance=, at=)"
)
DETACHED = (
    "the loss needs no gradient although there are parameters to train: loss_fn or the last stage has detached it, so "
    "nothing could learn"
)
_NAMES = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.INPUT: "the gradient of the input",
    Kind.WEIGHT: "the gradients of the weights",
    Kind.RECOMPUTE: "the forward for its backward",
    Kind.UPDATE: "the optimizer's step",
    Kind.ALL_REDUCE: "the sum over replicas",
}


def explain(error: BaseException, op: Op, step: int) -> None:
    """Say on an error what it came of."""
    what = _NAMES[op.kind] + ("" if op.kind is Kind.ALL_REDUCE else f" of micro-batch {op.microbatch}")
    add_note(error, f"in {op.label} of stage {op.stage}, {what}, in step {step}")
    if isinstance(error, RuntimeError) and "used in an in-place operation" in str(error):
        add_note(error, IN_PLACE)


def scalar(loss: Any) -> Tensor:
    """What a loss function has returned. PipelineError where that is not one number in a tensor."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = layout_of(loss) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise PipelineError(f"loss_fn must give one number, in a tensor, for each micro-batch; it has given {found}")


def versions(values: Sequence[Any]) -> list[int]:
    """They grow where a tensor among these is changed in place."""
    return [value._version for value in values if isinstance(value, Tensor)]
