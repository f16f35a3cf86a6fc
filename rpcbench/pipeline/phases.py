"""The two phases of a step, as its driver knows them: which optimizer step each stage holds, and words for that.

    all stages hold 6 ── all have gradients ── apply ──┬── all have answered: all hold 7
                                                       └── else, who has not answered holds 6 or 7

The driver counts what was answered, so it never claims more than it knows. Pure: nothing here calls anybody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from rpcbench.base.errors import StageLostError
from rpcbench.pipeline.layout import Layout

ANEW = (
    "make the Pipeline again and load a checkpoint into all its stages: pipe.resume(), or pipe.load(folder) with what "
    "pipe.save(folder) has written"
)

Held = tuple[int, int] | None
"""The least and the most optimizer steps that a stage may hold; None where nobody knows."""


class Lost(NamedTuple):
    """A worker that has gone: what it was at, and why it went."""

    worker: str
    at: str
    reason: str
    stages: tuple[int, ...]


class Standing:
    """Which optimizer step each stage holds, by its number in the layout."""

    def __init__(self, stages: Collection[int], layout: Layout | None = None) -> None:
        self.held: dict[int, Held] = dict.fromkeys(stages, (0, 0))
        self.layout = layout or Layout(len(stages))

    @property
    def number(self) -> int | None:
        """The optimizer step that all stages hold; None where they differ, or might."""
        found = set(self.held.values())
        held = found.pop()
        return held[0] if not found and held is not None and held[0] == held[1] else None

    def begin(self) -> int:
        """All are told to apply; the optimizer step that they will hold."""
        number = self.number
        assert number is not None, "an optimizer step on top of different ones"
        self.held = dict.fromkeys(self.held, (number, number + 1))
        return number + 1

    def reached(self, number: int, stages: Iterable[int] | None = None) -> None:
        """These stages, by default all, hold this optimizer step."""
        self.held.update(dict.fromkeys(self.held if stages is None else list(stages), (number, number)))

    def unknown(self) -> None:
        """Parameters change now, in ways that nobody counts."""
        self.held = dict.fromkeys(self.held)

    @property
    def least(self) -> int:
        """The optimizer step that all stages have reached, as far as is known."""
        return min((held[0] for held in self.held.values() if held is not None), default=0)

    @contextlib.contextmanager
    def replaced(self, number: int) -> Iterator[None]:
        """What the stages hold is replaced inside; nobody knows it if that fails, else all hold this step."""
        self.unknown()
        yield
        self.reached(number)

    def words(self, stages: Collection[int]) -> str:
        """As "stages 0 and 2 hold optimizer step 7, stage 1 holds optimizer step 6 or 7"."""
        groups: dict[Held, list[int]] = {}
        for stage in sorted(stages):
            groups.setdefault(self.held[stage], []).append(stage)
        return ", ".join(
            f"{self.layout.named(same)} {'hold' if len(same) > 1 else 'holds'} {_amount(held)}"
            for held, same in groups.items()
        )


def lost_error(lost: Sequence[Lost], when: str, standing: Standing, changed: bool) -> StageLostError:
    """What to raise for workers that have gone; `changed`: parameters were about to change, or had."""
    gone = sorted(stage for each in lost for stage in each.stages)
    left = [stage for stage in standing.held if stage not in gone]
    them = "it" if len(lost) == 1 else "them"
    told = [f"{each.worker} was lost {when}, {each.at}" for each in lost]
    amounts = " and ".join(dict.fromkeys(_amount(standing.held[stage]) for stage in gone))
    told.append(f"{standing.layout.named(gone)}, at {amounts}, went with {them}")
    if left:
        sure = not changed and all(held is not None and held[0] == held[1] for held in map(standing.held.get, left))
        told.append(("no parameter has changed: " if sure else "") + standing.words(left))
    restarts = ", ".join(f"cluster.restart({each.worker!r})" for each in lost)
    told.append(f"start {them} again ({restarts}), {ANEW}")
    reasons = "; ".join(dict.fromkeys(each.reason for each in lost))
    at = {each.worker: each.at for each in lost}
    return StageLostError("; ".join(told) + f". The reason: {reasons}", at, tuple(gone), dict(standing.held))


def _amount(held: Held) -> str:
    if held is None:
        return "an unknown mixture of optimizer steps"
    least, most = held
    return f"optimizer step {least}" if least == most else f"optimizer step {least} or {most}"
