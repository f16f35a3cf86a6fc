"""A simulated world as members with tables, one for each rank, which panels show as they show the members of a record.

Guarantees
- Times, bytes and pieces are those of the played ranks. A rank that was not played has what the played rank of its role
  has: it comes to a collective with it, and its pieces are those of its own place in the mesh.
- A fact that a simulation does not know has no row, and a sentence in the table "remarks" says so.
- At most `MOST` ranks are members: the played ones, and as many others of each role.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rpcbench.base.ids import Row, Table
from rpcbench.distributed.parameter_shards import HeldRegion
from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.simulate import simulate
from rpcbench.simulation.model_pieces import ModelPieces, PlacedParameter
from rpcbench.simulation.rank_log import ACTIVATIONS, BeginOperation, Collective, EndOperation, RankLog
from rpcbench.simulation.simulated_world import Role, SimulatedWorld
from rpcbench.simulation.step_timing import RankTimeline
from rpcbench.telemetry.recording import make_rank_world
from rpcbench.telemetry.shard_views import element_coordinates
from rpcbench.telemetry.views import World

MOST = 16
_SEATS = 64  # ranks of a mesh that is drawn
_ROOMY = 8  # columns of shards with room for whole names
_STAGES = "pp"


def _pair_roles(world: SimulatedWorld) -> list[tuple[Role, RankLog]]:
    """Return each role with the log of its played rank."""
    logs = {log.rank: log for log in world.logs}
    return [(role, logs[role.rank]) for role in world.roles]


def _mesh_words(world: SimulatedWorld) -> str:
    return ", ".join(f"{name} {size}" for name, size in world.mesh.items())


def _list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 0`, `ranks 0, 4 and 8`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _was_played(ranks: Sequence[int]) -> str:
    return f"{_list_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} played"


# -- pipeline
@dataclass(slots=True)
class _Operation:
    """An operation of a stage on the played rank."""

    action: BeginOperation
    begin: float
    end: float
    held: int = 0  # bytes of activations of its stage afterwards
    sent: int = 0  # bytes to other stages


def pipeline_members(world: SimulatedWorld) -> World:
    """Return the played ranks with the tables "ops" and "steps": one step."""
    operations = {role.rank: _gather_operations(log, world.timelines[role.name]) for role, log in _pair_roles(world)}
    running = {rank: own for rank, own in operations.items() if own}
    if not running:
        return make_rank_world({world.roles[0].rank: {}}, [_why_no_pipeline(world)])
    ideal = _ideal_share(running)
    tables = {rank: _pipeline_tables(rank, own, [*running], ideal) for rank, own in running.items()}
    return make_rank_world(tables, _pipeline_remarks(world, running))


def _why_no_pipeline(world: SimulatedWorld) -> str:
    if world.mesh.get(_STAGES, 1) == 1:
        return f"This world has no pipeline: its mesh, {_mesh_words(world)}, is not cut along a dimension {_STAGES}."
    return (
        "These ranks run no stages of torch.distributed.pipelining, so the micro-batch of an operator is not known. "
        "`world.timeline` shows the step without micro-batches."
    )


def _pipeline_remarks(world: SimulatedWorld, running: Mapping[int, Sequence[_Operation]]) -> Iterator[str]:
    yield f"A simulated step on {world.hardware.name}. Each row is one rank of its stage, the one that was played."
    if idle := [role.rank for role in world.roles if role.rank not in running]:
        yield f"On {_list_ranks(idle)} no stage ran."
    if missing := _missing_stages(running):
        yield (
            f"Not played were the stages {', '.join(map(str, missing))}. Each transfer finds them ready, so the bubble "
            "of the whole pipeline is larger."
        )


def _missing_stages(running: Mapping[int, Sequence[_Operation]]) -> list[int]:
    actions = [each.action for own in running.values() for each in own]
    return sorted({*range(actions[0].stages)} - {action.stage for action in actions})


def _gather_operations(log: RankLog, timeline: RankTimeline) -> list[_Operation]:
    """Return the operations of a rank in order. A change of activations belongs to the operation that began last."""
    times = iter(timeline.operations)
    changes = [change for change in log.memory if change.category == ACTIVATIONS]
    held: Counter[int] = Counter()
    found: list[_Operation] = []
    at = 0
    for n, action in enumerate(log.actions):
        if isinstance(action, BeginOperation | EndOperation):
            begun = at
            while at < len(changes) and changes[at].action <= n:
                at += 1
            if found:
                held[found[-1].action.stage] += sum(change.bytes for change in changes[begun:at])
        if isinstance(action, BeginOperation):
            found.append(_Operation(action, *next(times)))
        elif isinstance(action, EndOperation):
            found[-1].held = max(0, held[found[-1].action.stage])
        elif isinstance(action, Collective) and action.kind == "send" and found:
            found[-1].sent += action.bytes
    return found


def _ideal_share(running: Mapping[int, Sequence[_Operation]]) -> float | None:
    """Return the idle share of these orders with equal stages; None if a stage is missing, or none has a backward."""
    actions = [[each.action for each in own] for own in running.values()]
    lists = [[Op(each.stage, Kind(each.kind), each.microbatch) for each in own] for own in actions]
    if _missing_stages(running) or all(op.kind is Kind.FORWARD for own in lists for op in own):
        return None
    return simulate(lists).idle


def _pipeline_tables(
    rank: int, operations: Sequence[_Operation], ranks: Sequence[int], ideal: float | None
) -> dict[str, Table]:
    rows = {f"{rank}/{n}": _operation_row(rank, each) for n, each in enumerate(operations)}
    plan = [f"{each.action.stage}{each.action.kind}{each.action.microbatch}" for each in operations]
    step = {"step": 0, "worker": rank, "workers": list(ranks), "plan": plan, "ideal": ideal, "state": "done"}
    return {"ops": rows, "steps": {f"0/{rank}": step}}


def _operation_row(rank: int, each: _Operation) -> Row:
    return {
        "step": 0, "worker": rank, "stage": each.action.stage, "op": each.action.kind,
        "microbatch": each.action.microbatch, "begin": each.begin, "end": each.end, "bytes": each.sent,
        "held": each.held, "failed": False,
    }  # fmt: skip


# -- shards
def shard_members(world: SimulatedWorld) -> World:
    """Return ranks of each role with the tables "models" and "shards"."""
    tables: dict[int, dict[str, Table]] = {}
    count = max(1, MOST // len(world.roles))
    for role, log in _pair_roles(world):
        others = (rank for rank in _ranks_of_role(world, role) if rank != role.rank and _knows_pieces(world, log, rank))
        for rank in [role.rank, *itertools.islice(others, count - 1)]:
            tables[rank] = _shard_tables(world, log, rank)
    name = "rank {}" if len(tables) <= _ROOMY else "r{}"
    return make_rank_world(dict(sorted(tables.items())), _shard_remarks(world, tables), name)


def _shard_remarks(world: SimulatedWorld, tables: Mapping[int, dict[str, Table]]) -> Iterator[str]:
    played = sorted(role.rank for role in world.roles)
    yield f"The end of a simulated step, with the gradients that the optimizer has used; {_was_played(played)}."
    if len(tables) < world.ranks:
        yield f"Drawn are {len(tables)} of {world.ranks:,} ranks ({_mesh_words(world)})."
    if not any(own["models"] for own in tables.values()):
        yield "The program calls no module that has parameters."


def _ranks_of_role(world: SimulatedWorld, role: Role) -> list[int]:
    """Return the ranks that do as the played one does: those at its place along the stages. Of a role that was chosen
    by hand, the played one alone."""
    if role.name.startswith("rank "):
        return [role.rank]
    place = _places_of(world, role.rank).get(_STAGES)
    return [rank for rank in range(world.ranks) if _places_of(world, rank).get(_STAGES) == place]


def _places_of(world: SimulatedWorld, rank: int) -> dict[str, int]:
    return dict(zip(world.mesh, element_coordinates(rank, world.mesh.values()), strict=True))


def _knows_pieces(world: SimulatedWorld, log: RankLog, rank: int) -> bool:
    return all(_region_of(world, placed, rank) is not None for model in log.models for placed in model.parameters)


def _region_of(world: SimulatedWorld, placed: PlacedParameter, rank: int) -> HeldRegion | None:
    """Return the block that a rank holds; None if it is not known."""
    mesh = placed.piece.mesh
    if mesh is None or not placed.regions or rank in (role.rank for role in world.roles):
        return placed.piece.region  # a copy, or the played rank
    if rank in mesh.ranks:
        return _region_at(placed, mesh.ranks.index(rank))
    if any(world.mesh.get(name) != size for name, size in zip(mesh.names, mesh.shape, strict=True)):
        return None
    places, index = _places_of(world, rank), 0
    for name, size in zip(mesh.names, mesh.shape, strict=True):
        index = index * size + places[name]
    return _region_at(placed, index)


def _region_at(placed: PlacedParameter, index: int) -> HeldRegion | None:
    return placed.regions[index] if index < len(placed.regions) else None


def _shard_tables(world: SimulatedWorld, log: RankLog, rank: int) -> dict[str, Table]:
    models: Table = {}
    shards: Table = {}
    for n, model in enumerate(log.models):
        name = "model" if n == 0 or model.stage is not None else f"model {n + 1}"
        key = name if model.stage is None else f"{name} {model.stage}"
        models[key] = _model_row(name, model, rank)
        for order, placed in enumerate(model.parameters):
            region = _region_of(world, placed, rank)
            if region is not None:
                shards[f"{key}/{placed.piece.name}"] = _shard_row(placed, region, order)
    return {"models": models, "shards": shards}


def _model_row(name: str, model: ModelPieces, rank: int) -> Row:
    meshes = [mesh for mesh in model.meshes if len(mesh.ranks) <= _SEATS]
    return {
        "model": name, "stage": model.stage, "kind": model.kind, "rank": rank, "world": 0,  # no rank is missing
        "parameters": len(model.parameters), "remarks": list(model.remarks),
        "meshes": [[list(mesh.names), list(mesh.shape), list(mesh.ranks)] for mesh in meshes],
        "steps": 0, "gathered": 0, "most": 0, "groups": [],
    }  # fmt: skip


def _shard_row(placed: PlacedParameter, region: HeldRegion, order: int) -> Row:
    piece = placed.piece
    own, over = math.prod(piece.region.size), list(piece.mesh.names) if piece.mesh else []
    share = math.prod(region.size) / own if own else 0.0  # pieces of other ranks may be smaller by a row
    return {
        "name": piece.name, "also": list(piece.also), "order": order, "group": None, "kind": piece.kind,
        "shape": list(piece.shape), "offset": list(region.offset), "size": list(region.size), "gathered": None,
        "dtype": piece.dtype, "placements": list(piece.placements), "over": over,
        "device": piece.device, "trainable": piece.trainable, "bytes": piece.item * math.prod(region.size),
        "whole": piece.whole_bytes, "gradient": round(placed.gradient * share), "state": round(placed.state * share),
    }  # fmt: skip


# -- messages
def message_members(world: SimulatedWorld) -> World:
    """Return the played ranks, and those that they meet, with the table "collectives"."""
    played = [role.rank for role in world.roles]
    meetings = _gather_meetings(world)
    met = {rank for rows in meetings.values() for _, members in rows.values() for rank in members}
    others = sorted(met.difference(played))[: max(0, MOST - len(played))]
    ranks = [*played, *others]  # the played ones first: of those that come at once, one of them counts as the first
    tables: dict[int, dict[str, Table]] = {rank: {"collectives": {}} for rank in ranks}
    for key, rows in meetings.items():
        for rank, row in _complete_meeting(rows, ranks).items():
            tables[rank]["collectives"][key] = row
    return make_rank_world(tables, _message_remarks(world, ranks, bool(meetings)))


def _message_remarks(world: SimulatedWorld, ranks: Sequence[int], has_any: bool) -> Iterator[str]:
    played = sorted(role.rank for role in world.roles)
    if not has_any:
        yield "In this step no rank sends anything to another one."
    elif len(played) < world.ranks:
        yield (
            f"A simulated step; {_was_played(played)}. Shown are the collectives and transfers of played ranks; the "
            "others come to them at the same time, as they do the same."
        )
        if len(ranks) < world.ranks:
            yield f"Drawn are {len(ranks)} of {world.ranks:,} ranks ({_mesh_words(world)})."


_Meeting = dict[int, tuple[Row, tuple[int, ...]]]
"""By played rank: its row, and the ranks that take part."""


def _gather_meetings(world: SimulatedWorld) -> dict[str, _Meeting]:
    """Return the collectives and transfers. All ranks give one of them the same key: its ranks and its number there."""
    found: dict[str, _Meeting] = {}
    for role, log in _pair_roles(world):
        counts: Counter[str] = Counter()
        times = world.timelines[role.name].collectives
        for each in log.actions:
            if not isinstance(each, Collective):
                continue
            members = each.members(role.rank)
            scope = f"{each.group if each.peer is None else 'transfer'} {','.join(map(str, members))}"
            counts[scope] += 1
            at = times[each.number]
            row = {
                "group": each.group, "number": counts[scope], "op": each.op, "shape": each.shape, "bytes": each.bytes,
                "begin": at.come, "end": at.end, "failed": False, "site": each.site,
            }  # fmt: skip
            found.setdefault(f"{scope}.{counts[scope]}", {})[role.rank] = row, members
    return found


def _complete_meeting(rows: _Meeting, ranks: Sequence[int]) -> dict[int, Row]:
    """Return the rows of all drawn ranks; those that were not played come with the last one that was."""
    last, members = max(rows.values(), key=lambda each: float(each[0]["begin"]))
    drawn = [rank for rank in ranks if rank in members]
    more = {} if len(drawn) == len(members) else {"group": f"{last['group']} of {len(members):,} ranks"}
    names = [f"rank {rank}" for rank in members if rank in drawn]
    return {rank: {**(rows[rank][0] if rank in rows else last), "members": names, **more} for rank in drawn}
