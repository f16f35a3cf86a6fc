"""Simulates a program on all meshes of a number of ranks, and ranks them: `rpcbench.plan`.

Guarantees
- Each layout is simulated as `rpcbench.simulate` does it, but for the second rank that it plays.
- If the program raises an error on a layout, the plan has the layout with the error; the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rpcbench.launch.simulate_programs import (
    Place,
    Program,
    describe_hardware,
    find_roles,
    play_on_workers,
    play_rank,
)
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.rank_log import RankLog
from rpcbench.simulation.simulated_world import SimulatedWorld, format_seconds

__all__ = ["plan"]

_GIB = 2**30


class PlannedMesh(NamedTuple):
    """A mesh, and the simulated step on it."""

    mesh: Mapping[str, int]
    world: SimulatedWorld | None  # None: the program has failed
    error: str = ""

    @property
    def name(self) -> str:
        """The mesh as text: `dp 8, tp 2`, dimensions of size 1 left out."""
        return ", ".join(f"{name} {size}" for name, size in self.mesh.items() if size > 1) or "1 rank"

    @property
    def is_fitting(self) -> bool:
        return self.world is not None and self.world.is_fitting


@dataclass(frozen=True, repr=False)
class LayoutPlan:
    """Layouts, best first, as `rpcbench.plan` returns them: those that fit by step time, then the others by memory."""

    layouts: tuple[PlannedMesh, ...]
    hardware: Hardware

    @property
    def best(self) -> SimulatedWorld:
        """The fastest world that fits. LookupError if none does."""
        world = self.layouts[0].world
        if world is None or not world.is_fitting:
            raise LookupError(f"no layout fits {self.hardware.name}:\n{self}")
        return world

    def __str__(self) -> str:
        width = max(len(layout.name) for layout in self.layouts)
        head = f"{'':{width}}       step     peak       GiB"
        return "\n".join([head, *(f"{layout.name:{width}}  {_describe_layout(layout)}" for layout in self.layouts)])

    __repr__ = __str__


def _describe_layout(layout: PlannedMesh) -> str:
    if layout.world is None:
        return layout.error.splitlines()[0][:100]
    world = layout.world
    verdict = "" if world.is_fitting else "  does not fit"
    return f"{format_seconds(world.step_seconds):>9}  {world.mfu:6.1%}  {world.peak_bytes / _GIB:8.1f}{verdict}"


def plan(
    program: Program, ranks: int, hardware: str | Hardware = "h100", *, dimensions: Sequence[str] = ("dp", "tp"),
    most: Mapping[str, int] | None = None, tokens: int | None = None,
) -> LayoutPlan:  # fmt: skip
    """Simulate a program on all meshes of so many ranks, and say which fit, and which is fastest.

    Args:
        program: As of `rpcbench.simulate`; it reads the sizes from its mesh. To compare step times, let it divide one
            batch of the whole world among the ranks.
        ranks: Of the world.
        hardware: A name that `rpcbench.hardware` knows, or a description.
        dimensions: Names of the mesh, outermost first.
        most: The largest size of a dimension, such as `{"tp": 8}`.
        tokens: Of one step of the whole world.

    Returns:
        The layouts, best first. `print` shows a table; `rpcbench.panel("plan", plan)` draws them, as a notebook does.

    Raises:
        ValueError: There is no such hardware, or no mesh of these dimensions has so many ranks.

    >>> def program(mesh):
    ...     def step():
    ...         rows = torch.ones(64 // mesh["dp"].size(), 32)
    ...         return torch.nn.Linear(32, 32)(rows).sum().backward()
    ...     return step
    >>> [layout.name for layout in sorted(rpcbench.plan(program, 4, "a100").layouts, key=lambda each: each.name)]
    ['dp 2, tp 2', 'dp 4', 'tp 4']
    """
    described = describe_hardware(hardware)
    play_all = partial(play_on_workers, partial(_try_rank, program, described))
    return plan_with(play_all, ranks, described, dimensions, most, tokens)


def plan_with(
    play_all: Callable[[Sequence[Place]], list[RankLog | str]], ranks: int, hardware: Hardware,
    dimensions: Sequence[str], most: Mapping[str, int] | None = None, tokens: int | None = None,
) -> LayoutPlan:  # fmt: skip
    """Let `play_all` play the roles of all meshes, each to a log or to the text of an error, and return the plan. See
    `plan`."""
    limits = dict(most or {})
    meshes = [
        mesh for mesh in enumerate_meshes(ranks, dimensions)
        if all(size <= limits.get(name, size) for name, size in mesh.items())
    ]  # fmt: skip
    if not meshes:
        raise ValueError(f"no mesh of {', '.join(dimensions)} with at most {limits} has {ranks} ranks")
    places = [(mesh, role.rank) for mesh in meshes for role in find_roles(mesh, None)]
    played = list(zip(places, play_all(places), strict=True))
    layouts = [
        _make_layout(mesh, [result for (of, _), result in played if of is mesh], hardware, tokens) for mesh in meshes
    ]
    return LayoutPlan(tuple(sorted(layouts, key=_order_of)), hardware)


def enumerate_meshes(ranks: int, dimensions: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield all meshes of so many ranks."""
    if len(dimensions) == 1:
        yield {dimensions[0]: ranks}
        return
    for size in range(ranks, 0, -1):
        if ranks % size == 0:
            for rest in enumerate_meshes(ranks // size, dimensions[1:]):
                yield {dimensions[0]: size, **rest}


def _try_rank(program: Program, hardware: Hardware, mesh: Mapping[str, int], rank: int) -> RankLog | str:
    """Play a rank; return its log, or the error as text: one layout that is impossible does not end the others."""
    try:
        return play_rank(program, mesh, rank, hardware)
    except Exception as error:  # noqa: BLE001  (a program may raise anything; the plan shows it)
        return f"{type(error).__name__}: {error}"


def _make_layout(
    mesh: Mapping[str, int], played: Sequence[RankLog | str], hardware: Hardware, tokens: int | None
) -> PlannedMesh:
    if errors := [each for each in played if isinstance(each, str)]:
        return PlannedMesh(mesh, None, errors[0])
    logs = [each for each in played if isinstance(each, RankLog)]
    return PlannedMesh(mesh, SimulatedWorld(mesh, hardware, find_roles(mesh, None), logs, tokens))


def _order_of(layout: PlannedMesh) -> tuple[int, float]:
    if layout.world is None:
        return 2, math.inf
    return (0, layout.world.step_seconds) if layout.is_fitting else (1, layout.world.peak_bytes)
