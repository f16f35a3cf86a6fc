"""The levels of lesson 37: worlds, and what a step may use of memory, of messages and of time.

`level.draw(step)` plays a step, prints what is wrong with it or over a limit, and returns the picture.
"""

from __future__ import annotations

from dataclasses import dataclass

from draw import Drawing
from one_step import Step, play
from step_pictures import draw_run
from step_records import Run, StepError, World


@dataclass(frozen=True)
class Level:
    """A world with limits for each rank: MB of memory, MB that it sends; and for the step: ms."""

    world: World
    memory: float
    sent: float
    time: float

    def try_step(self, step: Step) -> tuple[Run, list[str]]:
        """Play a step; return what has happened, and each fault in a sentence or two."""
        try:
            run = play(step, self.world)
        except StepError as error:
            return error.run, [str(error)]
        return run, [fault for fault in (self._memory(run), self._sent(run), self._time(run)) if fault]

    def draw(self, step: Step) -> Drawing:
        run, faults = self.try_step(step)
        print("\n".join(faults) or "Within all limits.")
        return self.picture(run)

    def picture(self, run: Run) -> Drawing:
        return draw_run(run, self.memory)

    def _memory(self, run: Run) -> str:
        rank = max(range(run.world.size), key=lambda rank: run.fullest(rank).size)
        moment = run.fullest(rank)
        kinds = ", ".join(f"{kind} {size:g}" for kind, size in moment.kinds.items() if size)
        told = f"Memory: rank {rank} has {moment.size:g} MB at {moment.time:g} ms, and the limit is {self.memory:g}. "
        told += f"It holds {kinds}. The last of it came at {moment.line}."
        return told if moment.size > self.memory else ""

    def _sent(self, run: Run) -> str:
        rank = max(range(run.world.size), key=lambda rank: sum(run.sent(rank).values()))
        sent = run.sent(rank)
        calls = ", ".join(f"{call} {size:g}" for call, size in sent.items())
        told = f"Messages: rank {rank} sends {sum(sent.values()):g} MB, and the limit is {self.sent:g}: {calls}."
        return told if sum(sent.values()) > self.sent else ""

    def _time(self, run: Run) -> str:
        """The longest wait, of the rank that ends last."""
        if run.time <= self.time:
            return ""
        told = f"Time: the step takes {run.time:g} ms, and the limit is {self.time:g}. "
        rank = max(run.bars, key=lambda bar: bar.end).rank
        mine = [bar for bar in run.bars if bar.rank == rank]
        computes = sum(bar.end - bar.begin for bar in mine if bar.lane == "compute")
        waits: dict[str, float] = {}
        for bar in mine:
            if bar.lane == "wait":
                words = f"for {'a message' if bar.call == 'send' else bar.call}, at {bar.line}"
                waits[words] = waits.get(words, 0) + bar.end - bar.begin
        told += f"Rank {rank} computes for {computes:g} ms"
        if not waits:
            return f"{told}."
        words = max(waits, key=lambda words: waits[words])
        return f"{told} and waits for {sum(waits.values()):g}: longest, {waits[words]:g} ms, {words}."


PLAIN = Level(World(), memory=140, sent=48, time=40)
EARLY = Level(World(), memory=120, sent=48, time=30)
ZERO1 = Level(World(microbatches=8, zero=1), memory=90, sent=48, time=58)
ZERO2 = Level(World(microbatches=8, zero=1), memory=80, sent=72, time=58)
ZERO3 = Level(World(zero=3), memory=70, sent=66, time=29)
PIPELINE = Level(World(stages=4, replicas=1, microbatches=8, kept=4), memory=50, sent=16, time=73)
BOTH = Level(World(stages=2, replicas=2, microbatches=16, zero=1, kept=4), memory=70, sent=24, time=116)
ORDER = Level(World(microbatches=8, zero=1), memory=82, sent=48, time=58)
