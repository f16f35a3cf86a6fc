"""The result of a simulation: step time, memory and collectives of a world, by role of its ranks.

Guarantees
- Figures of the world come from the played ranks: each counts as often as its role has ranks.
- The step is as long as that of its slowest rank. Floating-point operations of a forward that is run again do not
  count as the model's.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import NamedTuple

from rpcbench.base.charts import Chart, as_html
from rpcbench.simulation.allocator import count_reserved
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.rank_log import CATEGORIES, RECOMPUTE, Collective, Kernel, MemoryPeak, RankLog
from rpcbench.simulation.step_timing import RankTimeline, time_logs
from rpcbench.simulation.world_pictures import memory_picture, save_timelines, timeline_chart

_MIB, _GIB = 2**20, 2**30
_SEEN = 5e-4  # share of a step from which on a cause is listed


class Role(NamedTuple):
    """Ranks that do the same."""

    name: str  # "pp=0", or "all" if all ranks are equal
    rank: int  # the one that was played
    ranks: int  # how many do as it does


class SimulatedCollective(NamedTuple):
    """A collective of a step, as a row of `rpcbench.collectives()`."""

    role: str
    op: str
    group: str
    ranks: tuple[int, ...]  # of a transfer: from, to
    bytes: int  # of a rank's tensors
    shape: str
    site: str
    module: str
    phase: str
    begin: float  # seconds from the begin of the step
    end: float


@dataclass(repr=False)
class SimulatedWorld:
    """A simulated step of a world, as `rpcbench.simulate` returns it.

    Args:
        mesh: Sizes by name.
        hardware: On which the step was timed; `on` times it on another.
        roles: Which ranks were played, and how many do as they do.
        logs: Of the played ranks.
        tokens: Of one step of the whole world, or None.
        remarks: Sentences on assumptions, and on ranks that are not as equal as they count.
    """

    mesh: Mapping[str, int]
    hardware: Hardware
    roles: Sequence[Role]
    logs: Sequence[RankLog]
    tokens: int | None = None
    remarks: Sequence[str] = ()
    _timelines: dict[int, RankTimeline] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._timelines = time_logs(self.logs, self.hardware, self.ranks)

    def on(self, hardware: Hardware) -> SimulatedWorld:
        """Return the same step on another hardware; nothing is played again."""
        return dataclasses.replace(self, hardware=hardware, _timelines={})

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    # -- time
    @property
    def timelines(self) -> dict[str, RankTimeline]:
        """The times of each role's played rank."""
        return {role.name: self._timelines[role.rank] for role in self.roles}

    @property
    def slowest(self) -> Role:
        """The role with the longest step."""
        return max(self.roles, key=lambda role: self._timelines[role.rank].seconds)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self._timelines[self.slowest.rank].seconds

    @property
    def causes(self) -> dict[str, float]:
        """Seconds of the slowest role's step by cause, longest first: they add up to the step."""
        causes = self._timelines[self.slowest.rank].causes
        return dict(sorted(causes.items(), key=lambda each: -each[1]))

    @property
    def flops(self) -> int:
        """Floating-point operations of the model in one step, in the whole world, without those that are run again."""
        kernels = ((role, each) for role, log in self._pair_roles() for each in log.actions if isinstance(each, Kernel))
        return sum(role.ranks * each.flops for role, each in kernels if each.part.phase != RECOMPUTE)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `flops`, as a share of those that the hardware could do in the step.

        The peak is that of the type that most of them have.
        """
        by_type: Counter[str] = Counter()
        for _, log in self._pair_roles():
            for each in log.actions:
                if isinstance(each, Kernel) and each.flops:
                    by_type[each.dtype] += each.flops
        if not by_type:
            return 0.0
        peak = self.hardware.peak_flops(by_type.most_common(1)[0][0])
        return self.flops / (self.step_seconds * peak * self.ranks)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second and rank; None where `simulate` was not told the tokens."""
        return None if self.tokens is None else self.tokens / self.step_seconds / self.ranks

    # -- memory
    @cached_property
    def memory(self) -> dict[str, MemoryPeak]:
        """The moment with the most memory, of each role."""
        return {role.name: log.peak_memory() for role, log in self._pair_roles()}

    @property
    def peak_bytes(self) -> int:
        """The most memory of any rank."""
        return max(peak.bytes for peak in self.memory.values())

    @cached_property
    def reserved_bytes(self) -> int:
        """The most memory that the caching allocator of a GPU reserves on any rank, with expandable segments."""
        return max(count_reserved(log.allocations) for _, log in self._pair_roles())

    @property
    def is_fitting(self) -> bool:
        """Whether the most memory of any rank is less than the hardware has."""
        return self.peak_bytes <= self.hardware.memory_bytes

    # -- collectives
    @cached_property
    def collectives(self) -> list[SimulatedCollective]:
        """The collectives of the step, by role in the order of issue."""
        rows = []
        for role, log in self._pair_roles():
            times = self._timelines[role.rank].collectives
            for each in log.actions:
                if isinstance(each, Collective):
                    rows.append(
                        SimulatedCollective(
                            role.name, each.op, each.group, each.members(role.rank), each.bytes, each.shape, each.site,
                            each.part.module, each.part.phase, times[each.number].begin, times[each.number].end,
                        )
                    )  # fmt: skip
        return rows

    def _pair_roles(self) -> list[tuple[Role, RankLog]]:
        logs = {log.rank: log for log in self.logs}
        return [(role, logs[role.rank]) for role in self.roles]

    # -- pictures
    @property
    def timeline(self) -> Chart:
        """The slowest role's step: a lane for compute, one for the collectives of each group. In a notebook it is a
        picture, else text."""
        role = self.slowest
        return timeline_chart(self._timelines[role.rank], f"A step of rank {role.rank}, {role.name}")

    def save(self, path: str | Path) -> Path:
        """Write the times of all roles to a `.json` file for ui.perfetto.dev; return its path."""
        return save_timelines(self.timelines.items(), path)

    def _repr_html_(self) -> str:
        role, log = max(self._pair_roles(), key=lambda each: self.memory[each[0].name].bytes)
        memory = as_html(memory_picture(log, self.hardware.memory_bytes), f"memory of {role.name}")
        return f"<pre>{escape(str(self))}</pre>{self.timeline.html()}<br>{memory}"

    # -- text
    def __str__(self) -> str:
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        rate = "" if self.tokens is None else f", {self.tokens_per_second:,.0f} tokens per second and rank"
        lines = [
            f"{shape}: {self.ranks:,} ranks of {self.hardware.name}",
            f"a step takes {format_seconds(self.step_seconds)}: {self.mfu:.1%} of the peak{rate}",
            *self._memory_lines(), *self._cause_lines(), *self.remarks,
        ]  # fmt: skip
        return "\n".join(lines)

    __repr__ = __str__

    def _memory_lines(self) -> list[str]:
        name, peak = max(self.memory.items(), key=lambda each: each[1].bytes)
        verdict = "fits" if self.is_fitting else "does not fit"
        at = f"{peak.part.phase} of {peak.part.module or 'the model'}"
        unit, word = (_GIB, "") if peak.bytes >= _GIB else (_MIB, " MiB")
        parts = ", ".join(f"{each} {peak.by_category[each] / unit:.1f}" for each in CATEGORIES)
        return [
            f"it {verdict}: {peak.bytes / unit:.1f}{word} of {self.hardware.memory_bytes / _GIB:.1f} GiB ({name}, {at})"
            f"; torch's allocator reserves {self.reserved_bytes / unit:.1f}{word}",
            f"  {parts}",
        ]

    def _cause_lines(self) -> list[str]:
        shares = ((seconds / self.step_seconds, seconds, cause) for cause, seconds in self.causes.items())
        seen = [each for each in shares if each[0] > _SEEN]
        return [f"  {share:6.1%}  {format_seconds(seconds):>9}  {cause}" for share, seconds, cause in seen]


def format_seconds(seconds: float) -> str:
    """Return a duration for people: `1.25 s`, `3.4 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
