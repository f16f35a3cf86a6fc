"""Workers that a pipeline has lost: the error that says who, at what they were, and what the stages hold.

Guarantees
- An error becomes a StageLostError where it comes of a death, and stays what it is where it does not.
- A pipeline that has lost a stage says so again, in the same words, whatever it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rpcbench.base.errors import ConnectionLostError, StageLostError, WorkerLostError
from rpcbench.pipeline.phases import Lost, Standing, lost_error
from rpcbench.pipeline.tasks import Task
from rpcbench.pipeline.watch import Watch


class Losses:
    """`homes`: stage → id of its worker. `tasks`: what each worker had to do in the latest step."""

    def __init__(self, watch: Watch, homes: Mapping[int, int], standing: Standing) -> None:
        self.watch, self._homes, self._standing = watch, homes, standing
        self.tasks: Mapping[int, Task] = {}
        self._told: StageLostError | None = None

    def repeat(self) -> None:
        """Raise what was raised before."""
        if self._told is not None:
            raise StageLostError(*self._told.args)

    def look(self, *, changed: bool) -> None:
        """Raise where somebody has gone between two steps."""
        if gone := self.watch.gone():
            raise self._lost(gone, "between two steps", changed)

    def tell_of(self, error: BaseException, when: str, *, changed: bool) -> None:
        """Raise StageLostError where an error comes of a death; else return."""
        if isinstance(error, WorkerLostError | ConnectionLostError) and (gone := self.watch.await_gone()):
            raise self._lost(gone, when, changed) from error

    def _lost(self, gone: Sequence[int], when: str, changed: bool) -> StageLostError:
        """What to raise now, and from then on."""
        lost = []
        for id_ in gone:
            task = self.tasks.get(id_)
            at = self.watch.at(id_, task.step if task else 0, task.ops if task else ())
            stages = tuple(stage for stage, home in self._homes.items() if home == id_)
            lost.append(Lost(self.watch.name(id_), at, self.watch.reason(id_), stages))
        error = lost_error(lost, when, self._standing, changed)
        self._told = StageLostError(*error.args)  # one that no traceback keeps anything alive through
        return error
