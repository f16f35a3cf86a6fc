"""The driver's watch over the processes of a pipeline: which of them have gone, at what they were, and why.

A worker that was started again under its name is another process, which has nothing of the pipeline: it counts as gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rpcbench.pipeline.ops import Op
from rpcbench.pipeline.record import Doing, Record, files, words
from rpcbench.protocol.node import Node
from rpcbench.runtime.agent import Agent

_SECONDS = 1.0
"""So long may the news of a death take to come here after a survivor has noticed it."""


class Watch:
    """`ids`: the workers, all of them there."""

    def __init__(self, agent: Agent, ids: Sequence[int]) -> None:
        self._agent = agent
        self._processes = agent.machine.ask(lambda node: {id_: node.members.members[id_].incarnation for id_ in ids})
        self._records: dict[int, Record] = {}

    @contextmanager
    def opening(self) -> Iterator[dict[int, str]]:
        """The path of each worker's record, to be opened there inside the block; none on other hosts."""

        def near(node: Node) -> list[int]:
            return [id_ for id_ in self._processes if node.members.members[id_].host == node.members.me.host]

        with files(self._agent.config.directory, self._agent.machine.ask(near)) as paths:
            self._records = {id_: Record.at(path) for id_, path in paths.items()}
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
        return place is None or (place.step == step and place.doing >= Doing.READY)

    def reason(self, id_: int) -> str:
        gone = self._agent.machine.ask(lambda node: node.gone.find(id_))
        return gone.reason if gone is not None else "it has been started again since"

    def name(self, id_: int) -> str:
        return self._agent.roster.name(id_)
