"""The stages of all replicas of a model, made from those of one; and a word where what they share is seen by others."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rpcbench.pipeline.layout import Layout
from rpcbench.pipeline.split import Stage

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


def warn_of_hosts(layout: Layout, stages: Sequence[Stage], hosts: Mapping[int, str]) -> None:
    """UserWarning, at the line that makes the pipeline, where replicas of a stage are on several of the `hosts`."""
    for stage in range(layout.stages):
        if len(set(layout.column(stage, hosts))) > 1:
            workers = layout.column(stage, {each.index: each.worker for each in stages})
            warnings.warn(_IN_CLEAR.format(workers=", ".join(workers)), UserWarning, stacklevel=3)
            return
