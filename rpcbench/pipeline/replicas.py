"""The stages of all replicas of a model, made from those of one; and a word where what they share is seen by others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from rpcbench.pipeline.layout import Layout
from rpcbench.pipeline.split import Stage
from rpcbench.runtime.agent import Agent

_IN_CLEAR = (
    "{workers} are on different hosts, and have the same stage: their gradients are added up through gloo, which "
    "neither encrypts them nor proves who is there, unlike all else in this world. Let replicas of a stage be on one "
    "host, or the network between them be your own"
)


def replicated(row: Sequence[Stage], workers: Sequence[str], replicas: int) -> list[Stage]:
    """The stages of all replicas, by their numbers; `row` has those of the first, `workers` are all of them."""
    wide = len(workers) // replicas
    own = {worker: place for place, worker in enumerate(workers[:wide])}
    return [
        replace(stage, index=replica * len(row) + stage.index, worker=workers[replica * wide + own[stage.worker]])
        for replica in range(replicas)
        for stage in row
    ]


def warn_of_hosts(agent: Agent, stages: Sequence[Stage], layout: Layout) -> None:
    """UserWarning, at the line that makes the pipeline, where replicas of a stage are on several hosts."""
    members = {member.name: member for member in agent.machine.ask(lambda node: list(node.members.members.values()))}
    workers = {stage.index: stage.worker for stage in stages}
    for stage in range(layout.stages):
        column = layout.column(stage, workers)
        if len({members[worker].host for worker in column if worker in members}) > 1:
            warnings.warn(_IN_CLEAR.format(workers=" and ".join(column)), UserWarning, stacklevel=3)
            return
