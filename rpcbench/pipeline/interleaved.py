"""Schedules for several stages per worker, stage s on worker s modulo the number of workers.

A micro-batch passes each worker `chunks` times, in pieces `chunks` times as short: so what a worker waits for at the
beginning and at the end is as many times shorter. More is sent, and more is kept.
"""

from __future__ import annotations

from rpcbench.pipeline.ops import Kind, Op, Ops, check, run


def bfs(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """Breadth first: all micro-batches through one stage, then through the worker's next; backwards likewise.

    Few, long runs through each stage. Every stage keeps the activations of all micro-batches.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023.
    """
    check(workers, microbatches, chunks)
    everything = range(microbatches)
    return [
        [op for chunk in range(chunks) for op in run(chunk * workers + w, Kind.FORWARD, everything)]
        + [op for chunk in reversed(range(chunks)) for op in run(chunk * workers + w, Kind.BACKWARD, everything)]
        for w in range(workers)
    ]


def interleaved(workers: int, microbatches: int, chunks: int = 2) -> Ops:
    """1F1B over several stages per worker: rounds of `workers` micro-batches go through all of a worker's stages.

    Where the micro-batches make no whole rounds, the last round has gaps.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
    """
    check(workers, microbatches, chunks)
    return in_rounds(workers, microbatches, chunks, Kind.BACKWARD, apart=2)


def in_rounds(workers: int, microbatches: int, chunks: int, backward: Kind, apart: int) -> Ops:
    """Forwards and backwards in turn, by rounds; a worker is `apart` forwards ahead of the next one when it begins with
    its backwards: the way there and back."""
    count = -(-microbatches // workers) * workers * chunks
    lists = []
    for w in range(workers):
        forwards = [_nth(n, w, workers, chunks, Kind.FORWARD) for n in range(count)]
        backwards = [_nth(n, w, workers, chunks, backward) for n in range(count)]
        ahead = min(count, (workers - 1 - w) * apart + (chunks - 1) * workers)
        turns = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
        lists.append(forwards[:ahead] + turns + backwards[count - ahead :])
    return [[op for op in own if op.microbatch < microbatches] for own in lists]


def _nth(number: int, worker: int, workers: int, chunks: int, kind: Kind) -> Op:
    """A worker's n-th forward, or backward: the chunks in turn, `workers` micro-batches each."""
    whole, left = divmod(number, workers * chunks)
    chunk, within = divmod(left, workers)
    if kind is not Kind.FORWARD:
        chunk = chunks - 1 - chunk
    return Op(chunk * workers + worker, kind, whole * workers + within)
