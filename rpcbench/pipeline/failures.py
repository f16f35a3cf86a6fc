"""What a driver knows when workers of its pipeline go: which have gone, at what they were, and what the stages hold.

    all stages hold 6 ── all have gradients ── apply ──┬── all have answered: all hold 7
                                                       └── else, a stage that has not answered holds 6 or 7

Guarantees
- The driver counts what was answered, so it never claims more than it knows.
- An error becomes a StageLostError where it comes of a death, and stays what it is where it does not.
- A pipeline that has lost a stage says so again, in the same words, whatever it is asked for.
- A worker that was started again under its name is another process, which has nothing of the pipeline: it counts as
  gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rpcbench.base.errors import ConnectionLostError, StageLostError, WorkerLostError
from rpcbench.pipeline.ops import Op
from rpcbench.pipeline.placement import WorkerMesh
from rpcbench.pipeline.step_log import CrashRecord, WorkerPhase, files, words
from rpcbench.pipeline.tasks import Task
from rpcbench.protocol.node import Node
from rpcbench.runtime.agent import Agent

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


class CommitState:
    """Which optimizer step each stage holds, by its number in the layout."""

    def __init__(self, stages: Collection[int], layout: WorkerMesh | None = None) -> None:
        self.held: dict[int, Held] = dict.fromkeys(stages, (0, 0))
        self.layout = layout or WorkerMesh(len(stages))

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


def lost_error(lost: Sequence[Lost], when: str, standing: CommitState, changed: bool) -> StageLostError:
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


class LostStages:
    """`homes`: stage → id of its worker. `tasks`: what each worker had to do in the latest step."""

    def __init__(self, watch: ProcessWatch, homes: Mapping[int, int], standing: CommitState) -> None:
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


_SECONDS = 1.0
"""So long may the news of a death take to come here after a survivor has noticed it."""


class ProcessWatch:
    """`ids`: the workers, all of them there."""

    def __init__(self, agent: Agent, ids: Sequence[int]) -> None:
        self._agent = agent
        self._processes = agent.machine.ask(lambda node: {id_: node.members.members[id_].incarnation for id_ in ids})
        self._records: dict[int, CrashRecord] = {}

    @contextmanager
    def opening(self) -> Iterator[dict[int, str]]:
        """The path of each worker's record, to be opened there inside the block; none on other hosts."""

        def near(node: Node) -> list[int]:
            return [id_ for id_ in self._processes if node.members.members[id_].host == node.members.me.host]

        with files(self._agent.config.directory, self._agent.machine.ask(near)) as paths:
            self._records = {id_: CrashRecord.at(path) for id_, path in paths.items()}
            yield paths

    def gone(self) -> list[int]:
        """Ids of those that have gone, as far as it is known by now."""

        def look(node: Node) -> list[int]:
            members = node.members.members
            return [i for i, born in self._processes.items() if i not in members or members[i].incarnation != born]

        return self._agent.machine.ask(look)

    def await_gone(self) -> list[int]:
        """As `gone`, for one who has reason to believe that there are some."""
        self._agent.roster.wait_until(lambda: bool(self.gone()), _SECONDS)
        return self.gone()

    def at(self, id_: int, step: int, ops: Sequence[Op]) -> str:
        """What a worker was at in its last step, in which it had these operations."""
        record = self._records.get(id_)
        return "on another host, so it is not known at what" if record is None else words(record.place, step, ops)

    def has_ended(self, id_: int, step: int) -> bool:
        """Whether a worker may have ended the operations of its last step, which is this one."""
        place = None if (record := self._records.get(id_)) is None else record.place
        return place is None or (place.step == step and place.doing >= WorkerPhase.READY)

    def reason(self, id_: int) -> str:
        gone = self._agent.machine.ask(lambda node: node.gone.find(id_))
        return gone.reason if gone is not None else "it has been started again since"

    def name(self, id_: int) -> str:
        return self._agent.roster.name(id_)
