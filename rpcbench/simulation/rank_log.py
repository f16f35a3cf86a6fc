"""The actions of one rank in a step, in the order in which its program issues them.

Guarantees
- An action holds plain data: no tensor, no process group. So a log is pickled, and outlives the rank.
- Times are not in it: `step_timing` gives an action its time on a given hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rpcbench.simulation.model_pieces import ModelPieces

COMPUTE = 0
"""The stream on which a program runs that has opened none."""
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"
"""RECOMPUTE: a forward that is run again within a backward pass."""


class ModelPart(NamedTuple):
    """The module and phase that an action belongs to."""

    module: str  # path in the model; "" for the model itself, and outside of it
    phase: str  # FORWARD, BACKWARD, RECOMPUTE or OPTIMIZER


class Kernel(NamedTuple):
    """An operator that computes."""

    stream: int
    op: str
    kind: str  # "matmul", "attention", "convolution" or "memory"
    dtype: str
    flops: int
    bytes: int  # read and written
    part: ModelPart


class Collective(NamedTuple):
    """A collective, or a transfer to or from one other rank."""

    stream: int  # on which it was issued
    number: int  # in this rank's program, from 1
    op: str  # as in the rows of `rpcbench.collectives`: "all_reduce(SUM)"; of both ends of a transfer "send"
    kind: str  # without arguments: "all_reduce", "send", "recv"
    group: str  # its label
    ranks: tuple[int, ...]  # of the group, as ranks of the world
    peer: int | None  # of a transfer: a rank of the world
    bytes: int  # of this rank's tensors, as the rows count them
    shape: str
    site: str  # the module or line that asked for it
    is_blocking: bool  # its stream waits for it at once
    part: ModelPart

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that take part where `rank` does: of a transfer, from and to."""
        if self.peer is None:
            return self.ranks
        return (rank, self.peer) if self.kind == "send" else (self.peer, rank)


class WaitForCollective(NamedTuple):
    """A stream goes on when a collective has ended."""

    stream: int
    number: int


class RecordEvent(NamedTuple):
    """An event is recorded on a stream."""

    stream: int
    event: int


class WaitForEvent(NamedTuple):
    """A stream goes on when an event has come."""

    stream: int
    event: int


class Synchronize(NamedTuple):
    """The program waits until all streams are idle."""


class BeginOperation(NamedTuple):
    """A stage of `torch.distributed.pipelining` begins an operation on a micro-batch."""

    stage: int
    stages: int  # of the pipeline
    kind: str  # "F", "B", or of a backward in two halves "I" and "W", as in `pipeline.ops.Kind`
    microbatch: int


class EndOperation(NamedTuple):
    """The operation of a stage ends."""


Action = (
    Kernel | Collective | WaitForCollective | RecordEvent | WaitForEvent | Synchronize | BeginOperation | EndOperation
)

PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, GATHERED, TEMPORARY = (
    "parameters", "gradients", "optimizer", "activations", "gathered", "temporary",
)  # fmt: skip
CATEGORIES = (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, GATHERED, TEMPORARY)


class MemoryChange(NamedTuple):
    """Memory that is taken or given back while the step runs."""

    action: int  # the number of actions issued before it
    bytes: int  # negative: given back
    category: str
    part: ModelPart


class Allocation(NamedTuple):
    """A storage gets a size: 0 gives it back."""

    storage: int  # its number in this rank's program
    bytes: int
    stream: int  # on which it is to be used first


@dataclass(slots=True)
class RankLog:
    """One step of one rank."""

    rank: int
    actions: list[Action] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)  # bytes by category when the step begins
    memory: list[MemoryChange] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)  # from the begin of the program, and not of the step
    parameters: int = 0  # numbers of parameters that this rank holds
    assumed: list[str] = field(default_factory=list)  # sentences on values that were assumed
    models: list[ModelPieces] = field(default_factory=list)  # those that the step calls

    def peak_memory(self) -> MemoryPeak:
        """Return the moment of the step with the most memory."""
        now = dict.fromkeys(CATEGORIES, 0) | self.before
        peak = MemoryPeak(sum(now.values()), dict(now), 0, ModelPart("", FORWARD))
        for change in self.memory:
            now[change.category] += change.bytes
            if (total := sum(now.values())) > peak.bytes:
                peak = MemoryPeak(total, dict(now), change.action, change.part)
        return peak


class MemoryPeak(NamedTuple):
    """The moment with the most memory."""

    bytes: int
    by_category: dict[str, int]
    action: int
    part: ModelPart
