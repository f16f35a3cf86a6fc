"""Plays the roles of a program, each in a process of its own, and times them: `rpcbench.simulate`. Measures the machine
of a cluster's workers as a hardware for it: `rpcbench.measure_hardware`.

Guarantees
- The notebook's own processes and process groups are not used: players are workers of a cluster of their own, which
  ends with the call.
- A second rank of the first role is played, too. If it does not do the same, the report says so.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import psutil

from rpcbench.base.errors import SimulationError
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.cluster import Cluster
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.hardware import hardware as hardware_of
from rpcbench.simulation.measurements import describe_machine, measure_rank
from rpcbench.simulation.rank_log import Action, Collective, Kernel, RankLog, Synchronize
from rpcbench.simulation.simulated_world import Role, SimulatedWorld

__all__ = ["measure_hardware", "simulate"]

Program = Callable[..., Callable[[], Any]]
"""Takes a mesh, or nothing; returns a step, a function without arguments."""
Place = tuple[Mapping[str, int], int]
"""A mesh, and a rank of it."""
T = TypeVar("T")
_STAGES = "pp"  # the dimension of a mesh along which programs differ
_UNEVEN = 0.02  # share of their bytes by which two ranks of one role may differ
_WARM_UP = 1  # steps before the one that is recorded: they make the states of optimizers


def simulate(
    program: Program, mesh: Mapping[str, int], hardware: str | Hardware = "h100", *, tokens: int | None = None,
    ranks: Sequence[int] | None = None,
) -> SimulatedWorld:  # fmt: skip
    """Play a program as the ranks of a world that is not there: the memory, collectives and time of a step.

    Tensors have no data, groups move nothing: so a rank of 1,024 runs on a laptop. The program may use
    `torch.distributed`, FSDP, DDP, tensor parallel and pipelining as it does on real ranks.

    Args:
        program: Runs on each played rank: `program(mesh)` makes model and optimizer, and returns a step: a function
            without arguments, which is called twice. It may be a lambda or a function of a cell.
        mesh: Sizes by name, outermost first. Ranks with different places along "pp" are different roles.
        hardware: A name that `rpcbench.hardware` knows, or a description.
        tokens: Of one step of the whole world, for `tokens_per_second`.
        ranks: Which ranks to play, where roles do not follow "pp".

    Returns:
        The world.

    Raises:
        SimulationError: The program reads a value, or its ranks wait for each other for ever.
        ValueError: The mesh has a size below 1, or there is no such hardware.
        Exception: An error of the program is raised with its type.

    >>> def program(mesh):
    ...     from torch.distributed.fsdp import fully_shard
    ...     model = torch.nn.Linear(64, 64)
    ...     fully_shard(model, mesh=mesh)
    ...     return lambda: model(torch.ones(8, 64)).sum().backward()
    >>> world = rpcbench.simulate(program, mesh={"dp": 64}, hardware="h100")
    >>> world.ranks
    64
    """
    described = describe_hardware(hardware)
    play_all = partial(play_on_workers, partial(play_rank, program, hardware=described))
    return simulate_with(play_all, mesh, described, tokens, ranks)


def play_on_workers(play: Callable[[Mapping[str, int], int], T], places: Sequence[Place]) -> list[T]:
    """Play ranks on workers of a cluster of their own, which plays as many at once as there are cores."""
    with Cluster(min(len(places), os.cpu_count() or 1)) as players:
        return list(players.map(lambda place: play(*place), places, progress=False))


def simulate_with(
    play_all: Callable[[Sequence[Place]], list[RankLog]], mesh: Mapping[str, int], hardware: Hardware,
    tokens: int | None = None, ranks: Sequence[int] | None = None,
) -> SimulatedWorld:  # fmt: skip
    """Let `play_all` play the roles of a mesh and a second rank of the first one, and return the world of their logs.
    See `simulate`."""
    if any(size < 1 for size in mesh.values()) or not mesh:
        raise ValueError(f"a mesh has sizes of at least 1, and not {dict(mesh)}")
    roles = find_roles(mesh, ranks)
    twin = _find_twin(mesh, roles)
    played = [role.rank for role in roles] + ([] if twin is None else [twin])
    logs = play_all([(mesh, rank) for rank in played])
    remarks = sorted({remark for log in logs for remark in log.assumed})
    if twin is not None and (difference := _find_difference(logs[0], logs.pop())):
        remarks.append(f"ranks {roles[0].rank} and {twin} count as equal, and are not: {difference}")
    return SimulatedWorld(dict(mesh), hardware, roles, logs, tokens, remarks)


def describe_hardware(hardware: str | Hardware) -> Hardware:
    """Return the description of a hardware by its name, or itself."""
    return hardware if isinstance(hardware, Hardware) else hardware_of(hardware)


def find_roles(mesh: Mapping[str, int], ranks: Sequence[int] | None) -> list[Role]:
    """Return the roles of a mesh's ranks: one for each place along "pp", or the given ranks."""
    size = math.prod(mesh.values())
    if ranks is not None:
        if bad := [rank for rank in ranks if not 0 <= rank < size]:
            raise ValueError(f"ranks={list(ranks)}: {bad[0]} is not one of the {size} ranks of {dict(mesh)}")
        return [Role(f"rank {rank}", rank, size // len(ranks)) for rank in ranks]
    stages = mesh.get(_STAGES, 1)
    if stages == 1:
        return [Role("all", 0, size)]
    stride = math.prod(itertools.islice(mesh.values(), [*mesh].index(_STAGES) + 1, None))
    return [Role(f"{_STAGES}={stage}", stage * stride, size // stages) for stage in range(stages)]


def _find_twin(mesh: Mapping[str, int], roles: Sequence[Role]) -> int | None:
    """Return the last rank of the first role; None if that has one rank, or was chosen by hand."""
    if roles[0].ranks == 1 or roles[0].name.startswith("rank"):
        return None
    places = [0 if name == _STAGES else size - 1 for name, size in mesh.items()]
    rank = 0
    for place, size in zip(places, mesh.values(), strict=True):
        rank = rank * size + place
    return rank


def _find_difference(first: RankLog, second: RankLog) -> str:
    """Return in which action two ranks differ; empty if they do the same. Their pieces of a tensor may be uneven: so
    operators may differ in bytes, by a little in all, and collectives may not. One may wait to print values."""
    actions = [[each for each in log.actions if not isinstance(each, Synchronize)] for log in (first, second)]
    for n, (one, other) in enumerate(itertools.zip_longest(*actions)):
        if _identify_action(one) != _identify_action(other):
            return f"action {n} is {one} and {other}"
    one, other = (sum(each.bytes for each in log.actions if isinstance(each, Kernel)) for log in (first, second))
    return f"their operators move {one:,} and {other:,} bytes" if abs(one - other) > _UNEVEN * max(one, other) else ""


def _identify_action(action: Action | None) -> tuple[object, ...]:
    return type(action), getattr(action, "op", ""), action.bytes if isinstance(action, Collective) else 0


def play_rank(
    program: Program, mesh: Mapping[str, int], rank: int, hardware: str | Hardware = "h100"
) -> RankLog:  # fmt: skip
    """Play one rank in this process, and return the log of its last step. See `simulate`."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from rpcbench.simulation.fake_operators import FakeOperators
    from rpcbench.simulation.fake_world import RankPlace, fake_world
    from rpcbench.simulation.rank_recorder import RankRecorder

    recorder, operators = RankRecorder(rank), FakeOperators()
    place = RankPlace(rank, math.prod(mesh.values()), describe_hardware(hardware))
    with fake_world(place, recorder.mark_gradients), operators, recorder:
        places = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        torch.manual_seed(0)
        step = program(places) if inspect.signature(program).parameters else program()
        if not callable(step):
            raise SimulationError(f"the program has returned {step!r}, and not its step, a function without arguments")
        for _ in range(_WARM_UP):
            step()
        recorder.begin_step()
        step()
        log = recorder.end_step()
        log.assumed += operators.remarks
        return log


def measure_hardware(cluster: BaseCluster, name: str = "this machine") -> Hardware:
    """Measure the speed that the workers of a cluster reach together, for `rpcbench.simulate(hardware=…)`.

    Matrix products by size, attention, memory, and the collectives of their process group. It takes some ten seconds;
    nothing else should run meanwhile. Times hold for as many ranks as the cluster has workers, since they share cores
    and memory.

    Args:
        cluster: All of its workers take part.
        name: Of the description.

    Returns:
        A description; `save` keeps it in a file.

    Raises:
        CollectiveError: A worker is in a process group already.

    >>> machine = rpcbench.measure_hardware(cluster)
    >>> machine.has_streams
    False
    """
    measured = cluster.spmd(measure_rank)
    return describe_machine(name, measured, psutil.virtual_memory().total / len(measured))
