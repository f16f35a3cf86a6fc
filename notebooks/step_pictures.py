"""Pictures of steps for lesson 37: the memory of the fullest rank over time, and what each rank and its link do."""

from __future__ import annotations

import itertools

from draw import Drawing
from step_records import Bar, Moment, Run

from rpcbench.base.charts import LETTER, STRONG, Picture

MEMORY = {  # from the bottom up
    "weights": "indigo", "gathered": "purple", "states": "olive", "gradients": "orange", "kept": "teal",
    "inputs": "dim",
}  # fmt: skip
CALLS = {
    "forward": "blue", "backward": "amber", "update": "green", "all_reduce": "purple", "reduce_scatter": "orange",
    "all_gather": "indigo", "send": "teal",
}  # fmt: skip
LEFT, WIDE, HIGH, TOP = 76, 640, 120, 44  # of the data: its left, its width; the height of memory; its top
COMPUTE, NETWORK, GAP = 22, 16, 8  # heights of the lanes of a rank, and the gap between ranks


def draw_run(run: Run, limit: float | None = None) -> Drawing:
    """Draw a step. `limit`: MB of memory that a rank has."""
    ranks = range(run.world.size)
    fullest = max(ranks, key=lambda rank: run.fullest(rank).size)
    moment = run.fullest(fullest)
    of = f" of {limit:g}" if limit is not None else ""
    title = f"Memory of rank {fullest}: at most {moment.size:g}{of} MB. {_tell_time(run)}"
    picture = Picture(LEFT + WIDE + 64, title, words := tell_run(run))
    picture.draw_text(12, 20, title, "strong")
    per_ms = WIDE / (run.time or 1)
    _draw_memory(picture, run, fullest, moment, limit, per_ms)
    y = float(TOP + HIGH + 34)
    for rank in ranks:
        _draw_lanes(picture, run, rank, y, per_ms)
        y += COMPUTE + NETWORK + GAP
    _draw_axis(picture, run.time, per_ms, y + 8)
    called = {bar.call for bar in run.bars}
    _draw_legend(picture, {call: colour for call, colour in CALLS.items() if call in called}, y + 30)
    return Drawing(picture.svg(), words)


def tell_run(run: Run) -> str:
    """The same in words, a line for each rank."""
    lines = [_tell_time(run)]
    for rank in range(run.world.size):
        moment = run.fullest(rank)
        held = ", ".join(f"{kind} {size:.4g}" for kind, size in moment.kinds.items() if size)
        done = "; ".join(
            f"{bar.call} {_label(run, bar)} {bar.begin:.4g} to {bar.end:.4g}" for bar in run.bars
            if bar.rank == rank and bar.lane != "wait"
        )  # fmt: skip
        lines.append(f"rank {rank}: at most {moment.size:.4g} MB, at {moment.time:.4g} ms ({held}). {done}")
    return "\n".join(lines)


def _tell_time(run: Run) -> str:
    return f"The step {'fails after' if run.failed else 'takes'} {run.time:.4g} ms."


def _draw_memory(picture: Picture, run: Run, rank: int, moment: Moment, limit: float | None, per_ms: float) -> None:
    scale = HIGH / max(moment.size, limit or 0) * 0.96
    bottom = TOP + HIGH
    picture.draw_rect(LEFT, TOP, WIDE, HIGH, "plate")
    history = run.memory(rank)
    ends = [time for time, _, _ in history[1:]] + [run.time]
    for kind, colour in MEMORY.items():
        below = list(MEMORY)[: list(MEMORY).index(kind)]
        pieces = [
            (begin, end, sum(kinds.get(each, 0) for each in below), kinds.get(kind, 0))
            for (begin, kinds, _), end in zip(history, ends) if end > begin
        ]  # fmt: skip
        for (low, size), same in itertools.groupby(pieces, key=lambda piece: piece[2:]):
            (begin, *_), *_, (_, end, *_) = *(whole := list(same)), whole[-1]
            y = bottom - (low + size) * scale
            picture.draw_rect(LEFT + begin * per_ms, y, (end - begin) * per_ms + 0.3, size * scale, f"f-{colour}", 0)
    top = bottom - moment.size * scale
    picture.draw_circle(LEFT + moment.time * per_ms, top, 4, "f-red")
    if limit is not None:
        level = bottom - limit * scale
        picture.draw_line(LEFT, level, LEFT + WIDE, level, "line s-red dashed")
        picture.draw_text(LEFT + WIDE + 5, level + 4, f"{limit:g} MB", "note")
    picture.draw_text(12, bottom - 4, f"rank {rank}", "strong")
    shown = {kind for _, kinds, _ in history for kind, size in kinds.items() if size}
    _draw_legend(picture, {kind: colour for kind, colour in MEMORY.items() if kind in shown}, bottom + 18)


def _draw_lanes(picture: Picture, run: Run, rank: int, y: float, per_ms: float) -> None:
    picture.draw_text(12, y + 16, f"rank {rank}", "strong")
    for lane, top, high in (("compute", y, COMPUTE), ("network", y + COMPUTE + 1, NETWORK)):
        picture.draw_rect(LEFT, top, WIDE, high, "plate", 0)
        for bar in run.bars:
            if bar.rank == rank and bar.lane == lane:
                x, width = LEFT + bar.begin * per_ms, (bar.end - bar.begin) * per_ms
                picture.draw_rect(x, top, max(1.5, width - 0.8), high, f"f-{CALLS[bar.call]}", 1)
                if width > LETTER * len(label := _label(run, bar)) + 2:
                    ink = "on-amber" if CALLS[bar.call] == "amber" else "on-blue"
                    picture.draw_text(x + width / 2, top + high / 2 + 4.5, label, f"middle {ink}")


def _label(run: Run, bar: Bar) -> str:
    """The layer; in a pipeline, where there is one, the micro-batch."""
    in_pipeline = run.world.stages > 1 and bar.name.microbatch is not None
    return str(bar.name.microbatch if in_pipeline else bar.name.layer)


def _draw_axis(picture: Picture, time: float, per_ms: float, y: float) -> None:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if time / step <= 12 or step == 100)
    for mark in range(0, int(time) + 1, step):
        picture.draw_text(LEFT + mark * per_ms, y + 4, mark, "note middle")
    picture.draw_text(LEFT + WIDE + 16, y + 4, "ms", "note")


def _draw_legend(picture: Picture, colours: dict[str, str], y: float) -> None:
    x = float(LEFT)
    for name, colour in colours.items():
        picture.draw_circle(x + 5, y - 4, 5, f"f-{colour}")
        picture.draw_text(x + 15, y, name, "note")
        x += 32 + STRONG * len(name)
