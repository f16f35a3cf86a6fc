"""Checks of lesson 33."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from resume import PARTS, Training, bounds
from resume import pieces as right_pieces
from resume import total_time as right_time
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor

from checks import NotYet, differ, dots_left, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks

Piece = tuple[int, int, int]


# -- what belongs to a checkpoint
@exercise(
    "Five parts change with each step: the weights, what Adam remembers, the learning rate, the noise, and the "
    "place in the "
    "rows. And what is returned must not change when the training goes on.",
    'Begin with `copy.deepcopy({"model": training.model.state_dict(), ...})`. A generator has `get_state()`, and '
    "the position "
    "is a number.",
)
def snapshot(answer: Callable[[Training], Any]) -> None:
    """`answer(training)` is a dict with which `load` makes a new training go on as this one does."""
    for before in (3, 8, 17, 0):
        training, unbroken = Training(), Training()
        for _ in range(before):
            training.step()
            unbroken.step()
        with trying():
            saved = returned(answer(training))
        require(isinstance(saved, dict), f"It should return a dict, not {shown(type(saved).__name__)}.")
        unknown = sorted(str(name) for name in saved if name not in PARTS)
        require(not unknown, f"`load` knows the names {', '.join(PARTS)}, and not {', '.join(unknown)}.")
        there = Training()
        with trying("load, with what you returned,"):
            there.load(saved)
        at_once = copy.deepcopy(saved)
        wanted = [unbroken.step() for _ in range(6)]
        require([training.step() for _ in range(6)] == wanted, "The snapshot has changed the training itself.")
        for name in saved:
            require(_same(saved[name], at_once[name]), f"`{name}` in what you returned has changed while the "
                                                       f"training went "
                    "on: it holds the training's own tensors.")  # fmt: skip
        with trying("A second snapshot of the same training"):
            answer(training)
        changed = [name for name in at_once if name not in saved or not _same(saved[name], at_once[name])]
        require(not changed, f"A second snapshot has changed the first one: {', '.join(map(repr, changed))}.")
        found = [there.step() for _ in range(6)]
        if found != wanted:
            raise NotYet(_what_differs(at_once, before))
    right("All five, as they were: the run goes on as though nothing had happened.")


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(_same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    return bool(one == two) if isinstance(one, int | float | str | bool | None) else True


def _what_differs(saved: dict[str, Any], before: int) -> str:
    training, there = Training(), Training()
    for _ in range(before):
        training.step()
    there.load(saved)
    told = f"After {before} steps, and loaded into a new training"
    if there.position != training.position:
        return f"{told}: it begins again with row {there.position}, and should go on with row {training.position}."
    if not _same(there.model.state_dict(), training.model.state_dict()):
        return f"{told}: its weights are other ones."
    if not _same(there.optimizer.state_dict()["state"], training.optimizer.state_dict()["state"]):
        return f"{told}: its next step has another size than it should. Adam remembers something of all steps before."
    if not _same(there.scheduler.state_dict(), training.scheduler.state_dict()):
        return f"{told}: in some steps its learning rate is another one than it should be."
    return f"{told}: it adds other noise to the rows."


# -- who reads what
@exercise(
    "A new rank has rows `first` to `last` of the whole tensor, and an old rank had rows `begin` to `end`. Which "
    "rows have "
    "both?",
    "`low, high = max(first, begin), min(last, end)`; if low < high, the rows low - begin to high - begin of that "
    "file.",
)
def pieces(answer: Callable[[int, int, int, int], Any]) -> None:
    """`answer(rank, ranks, old, length)` lists for a new rank which rows of which old files it reads."""
    for ranks, old, length in (
        (3, 4, 12),
        (4, 3, 12),
        (2, 4, 10),
        (3, 4, 10),
        (5, 2, 7),
        (1, 3, 7),
        (4, 4, 8),
        (6, 4, 4),
        (3, 1, 7),
        (2, 4, 5),  # the last old rank has no rows
        (8, 3, 20),
    ):
        for rank in range(ranks):
            with trying():
                found = returned(answer(rank, ranks, old, length))
            case = f"{length} rows from {old} to {ranks} ranks, new rank {rank}"
            found = read(found, [(object,) * 3], "A list of triples (old rank, begin, end) is wanted")
            found = read(found, [(int, int, int)], f"{case}: triples of whole numbers are wanted")
            wanted = right_pieces(rank, ranks, old, length)
            if found != wanted:
                raise NotYet(_wrong_pieces(found, wanted, rank, ranks, old, length, case))
    right("No rank reads a row that it does not need.")


def _wrong_pieces(
    found: list[Piece], wanted: list[Piece], rank: int, ranks: int, old: int, length: int, case: str
) -> str:
    if any(number not in range(old) for number, _, _ in found):
        return f"{case}: {shown(found)} names an old rank that is not there."
    if any(begin >= end for _, begin, end in found):
        return f"{case}: {shown(found)} has a piece without rows."
    whole = [
        (number, begin + bounds(number, old, length)[0], end + bounds(number, old, length)[0])
        for number, begin, end in wanted
    ]
    if found == whole:
        return f"{case}: {shown(found)}: the rows are counted from the beginning of the file, not of the whole tensor."
    if found == [(number, begin, end - 1) for number, begin, end in wanted if begin < end - 1]:
        return f"{case}: {shown(found)}: `end` is the row after the last one, as in a slice."
    rows = sum(end - begin for _, begin, end in found)
    first, last = bounds(rank, ranks, length)
    if rows != last - first:
        there = f"it has the rows {first} to {last} (not included), which are {last - first}"
        return f"{case}: {there}; {shown(found)} are {rows}."
    return f"{case}: it reads {wanted}, not {shown(found)}."


# -- saved on three ranks, read on two
ROWS, WIDTH, OLD, NEW = 10, 3, 3, 2
TABLE = torch.arange(ROWS * WIDTH).float().reshape(ROWS, WIDTH)


@exercise(
    "DCP must be told that the pieces are parts of one tensor, and how many rows that has: 4, 4 and 2 are not three "
    "times 4. Which kind of tensor knows its global shape?",
    "Begin with a function for both: `DTensor.from_local(piece, mesh, [Shard(0)], shape=(rows, width), "
    "stride=(width, 1))`, where `mesh` is `init_device_mesh('cpu', (dist.get_world_size(),))`. `load` gives it an "
    "empty piece with as many rows as `resume.bounds` says.",
)
def on_ranks(save: Callable[[Tensor, int, str], Any], load: Callable[[int, int, str], Any]) -> None:
    """`save(piece, rows, folder)` runs on three ranks, `load(rows, width, folder)` afterwards on two."""
    with tempfile.TemporaryDirectory() as folder:
        pieces = [TABLE[slice(*bounds(rank, OLD, ROWS))].clone() for rank in range(OLD)]
        run_on_ranks(save_here, save, [(piece, ROWS, folder) for piece in pieces])
        _one_table(folder)
        ran = run_on_ranks(load_here, load, [(ROWS, WIDTH, folder)] * NEW)
        _loaded(ran)
        _own_rows_read(ran)
    right("Three ranks have written, each its own rows, and two have read them as theirs.")


def save_here(answer: Callable[[Tensor, int, str], Any], piece: Tensor, rows: int, folder: str) -> None:
    """On a worker: save a piece."""
    with _failures_told():
        answer(piece, rows, folder)


def load_here(answer: Callable[[int, int, str], Any], rows: int, width: int, folder: str) -> tuple[str, Any, int]:
    """On a worker: the type of what was loaded, its numbers if it is a tensor of this rank alone, and the rows that
    DCP has read for it."""
    with _failures_told(), _reads_counted() as counted:
        found = answer(rows, width, folder)
    if isinstance(found, Tensor) and not isinstance(found, DTensor):
        return "Tensor", found, sum(counted)
    return type(found).__name__, None, sum(counted)


@contextlib.contextmanager
def _reads_counted() -> Iterator[list[int]]:
    """The rows of each piece of a tensor that DCP reads from a file."""
    counted: list[int] = []
    read_data = dcp.FileSystemReader.read_data

    def counting(reader: dcp.FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Any:
        counted.extend(item.lengths[0] for item in plan.items if item.type == LoadItemType.TENSOR)
        return read_data(reader, plan, planner)

    with mock.patch.object(dcp.FileSystemReader, "read_data", counting):
        yield counted


@contextlib.contextmanager
def _failures_told() -> Iterator[None]:
    planner = logging.getLogger(DefaultSavePlanner.__module__)  # its warnings say what the error says
    try:
        planner.disabled = True
        yield
    except CheckpointException as error:  # no `Exception`: it would end the cell
        rank, (cause, _) = min(error.failures.items())
        text = str(cause).strip().partition("\n")[0].rstrip(".")
        missing = text.partition("Missing key in checkpoint state_dict: ")[2]
        require(not missing, f"`load` asks for a tensor by the name {missing!r}, and `save` has written none of this "
                "name. A checkpoint knows the table by one name, for both.")  # fmt: skip
        sizes = " The global shape does not fit the pieces, of 4, 4 and 2 rows." if "volume" in text else ""
        raise NotYet(f"DCP reports of rank {rank} a {type(cause).__name__}: {text}.{sizes}") from None
    finally:
        planner.disabled = False


def _one_table(folder: str) -> None:
    """The checkpoint has one tensor of all rows, and each rank has written its own ones."""
    reader = dcp.FileSystemReader(folder)
    with trying("In the folder there is no checkpoint: reading it"):
        require(reader.validate_checkpoint_id(folder) and (reader.path / ".metadata").exists(),
                f"After `save` the folder has no complete checkpoint.{dots_left()}")  # fmt: skip
        metadata = reader.read_metadata()
    tables = {name: each for name, each in metadata.state_dict_metadata.items()
              if isinstance(each, TensorStorageMetadata)}  # fmt: skip
    require(len(tables) == 1, f"The checkpoint has {len(tables)} tensors: {', '.join(tables) or 'none'}. The table is "
            "one tensor, under one name on all ranks.")  # fmt: skip
    ((name, table),) = tables.items()
    require(table.size[0] != len(TABLE[slice(*bounds(0, OLD, ROWS))]), f"The checkpoint has {list(table.size)} under "
            f"{name!r}: that is the piece of one rank, and those of the others are missing.")  # fmt: skip
    require(tuple(table.size) == TABLE.shape, f"The checkpoint has {list(table.size)} under {name!r}; the table has "
            f"{list(TABLE.shape)}. The ranks have 4, 4 and 2 rows.")  # fmt: skip
    rows = {}  # file → rows in it
    for index, info in metadata.storage_data.items():
        begin = index.offset[0]
        size = next(chunk.sizes[0] for chunk in table.chunks if chunk.offsets[0] == begin)
        rows[info.relative_path] = rows.get(info.relative_path, 0) + size
    require(sorted(rows.values()) == [2, 4, 4], f"The table is complete, but of its rows the files have "
            f"{', '.join(f'{count} ({file})' for file, count in sorted(rows.items()))}. Each rank should write its own "
            "rows: 4, 4 and 2.")  # fmt: skip


def _loaded(ran: Run) -> None:
    for rank, (kind, found, _) in enumerate(ran.values):
        begin, end = bounds(rank, NEW, ROWS)
        told = f"Saved on {OLD} ranks, loaded on {NEW}: rank {rank}"
        require(kind != "NoneType", f"{told} gets None from `load`. It should return this rank's rows.{dots_left()}")
        require(kind != "DTensor", f"{told} returns a DTensor. Its own piece is wanted, `to_local()`.")
        require(found is not None, f"{told} returns a {kind}, not a tensor.")
        require(found.shape != TABLE.shape, f"{told} returns the whole table. Its own {end - begin} rows are wanted.")
        require(found.shape == (end - begin, WIDTH), f"{told} returns {list(found.shape)}; with {NEW} ranks it has "
                f"{end - begin} rows of {WIDTH}.")  # fmt: skip
        require(found.dtype == TABLE.dtype, f"{told} returns rows of {found.dtype}; the table is of {TABLE.dtype}.")
        same = [n for n in range(ROWS - len(found) + 1) if torch.equal(found, TABLE[n : n + len(found)])]
        require(same or torch.equal(found, TABLE[begin:end]), f"{told} returns rows with other numbers than those that "
                "were saved. `dcp.load` fills the tensors that it is given.")  # fmt: skip
        require(same[:1] == [begin], f"{told} returns the rows from {same[0] if same else None}; its own begin with "
                f"{begin}.")  # fmt: skip


def _own_rows_read(ran: Run) -> None:
    for rank, (_, found, count) in enumerate(ran.values):
        require(count <= len(found), f"The right rows; but for the {len(found)} rows of rank {rank} DCP has read "
                f"{count} from the files. Of a large table no rank has room for all rows.")  # fmt: skip


# -- how often
@exercise(
    "If one node fails once in M minutes, how often does one of n nodes fail?",
    "`mtbf = node_mtbf / nodes`; then the two formulas above, with √ as `math.sqrt` or `** 0.5`.",
)
def how_often(answer: Callable[[float, float, int], Any]) -> None:
    """`answer(cost, node_mtbf, nodes)` is Young's interval, and the share of the time that is lost with it."""
    times = ((2.0, 400.0, 4), (0.5, 10_000.0, 100), (3.0, 600.0, 1), (1.0, 50_000.0, 16), (2.5, 1000.0, 3))
    for cost, node_mtbf, nodes in times:
        with trying():
            found = returned(answer(cost, node_mtbf, nodes))
        interval, lost = read(found, (float, float), "It should return two numbers, (interval, lost)")
        mtbf = node_mtbf / nodes
        wanted = math.sqrt(2 * cost * mtbf)
        case = f"{nodes} nodes, each with {node_mtbf:g} minutes between failures, {cost:g} minutes for a save"
        if not _near(interval, wanted):
            raise NotYet(_wrong_interval(interval, cost, node_mtbf, nodes, case))
        share = cost / wanted + wanted / (2 * mtbf)
        if not _near(lost, share):
            require(not _near(lost, share / 2), f"{case}: {lost:.2%} is only one half: saves take time, and "
                                                f"failures cost "
                    "work.")  # fmt: skip
            require(not _near(lost, cost / wanted + wanted / mtbf), f"{case}: a failure does not cost a whole "
                                                                    f"interval: in "
                    "the mean it comes in the middle of one.")  # fmt: skip
            told = differ(100 * share, 100 * lost, " % of the time is lost, not ")
            raise NotYet(f"{case}: the interval is right, and {told} %.")
    right("Twice as many nodes, and you save more often by a factor of √2.")


def _near(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=1e-6)


def _wrong_interval(found: float, cost: float, node_mtbf: float, nodes: int, case: str) -> str:
    mtbf = node_mtbf / nodes
    if nodes > 1 and _near(found, math.sqrt(2 * cost * node_mtbf)):
        return f"{case}: {found:.4g} would be right for one node. With more nodes one of them fails more often."
    if nodes > 1 and _near(found, math.sqrt(2 * cost * node_mtbf * nodes)):
        return f"{case}: {found:.4g} grows with the number of nodes. More nodes fail more often."
    if _near(found, math.sqrt(cost * mtbf)):
        return f"{case}: {found:.4g} lacks the 2 under the root."
    if _near(found, 2 * cost * mtbf):
        return f"{case}: {found:.4g} lacks the root."
    if _near(found * 60, math.sqrt(2 * cost * mtbf)) or _near(found, 60 * math.sqrt(2 * cost * mtbf)):
        return f"{case}: all numbers are in minutes, the interval too."
    return f"{case}: the interval should be {differ(math.sqrt(2 * cost * mtbf), found, ' minutes, not ')}."


# -- the time of a run
RUNS: list[tuple[int, int, int, int, list[int]]] = [  # work, interval, cost, restart, failures
    (100, 30, 2, 5, []),
    (90, 30, 2, 5, []),
    (100, 30, 2, 5, [50]),
    (100, 30, 2, 5, [31]),
    (100, 30, 2, 5, [50, 10, 40]),
    (100, 30, 2, 5, [64, 500]),
    (40, 50, 3, 1, [39]),
    (60, 20, 4, 10, [70, 1]),
    (60, 20, 4, 10, [68]),  # it ends at the moment of the failure
    (100, 10, 1, 3, [33, 33, 20, 33]),
]


@exercise(
    "Follow one start: how many pieces, each with its save, are complete before the failure? Only these count; the "
    "time "
    "until the failure has passed in any case.",
    "For each `up`, begin with `left = work - done`, which needs `left + (ceil(left / interval) - 1) · cost`. Is that "
    "at most `up`? If not: how many times does `interval + cost` fit into `up`, and how long has this start taken?",
)
def total_time(answer: Callable[[int, int, int, int, list[int]], Any]) -> None:
    """`answer(work, interval, cost, restart, failures)` is how long a run takes."""
    for work, interval, cost, restart, failures in RUNS:
        with trying():
            found = returned(answer(work, interval, cost, restart, list(failures)))
        found = read(found, float, "A number is wanted")
        wanted = right_time(work, interval, cost, restart, failures)
        if found != wanted:
            raise NotYet(_wrong_total(found, wanted, work, interval, cost, restart, failures))
    right("With this you can try any interval, on failures of any kind.")


def _wrong_total(
    found: float, wanted: float, work: int, interval: int, cost: int, restart: int, failures: Sequence[int]
) -> str:
    case = f"work {work}, interval {interval}, cost {cost}, restart {restart}, failures {list(failures)}"
    saves = math.ceil(work / interval) - 1
    if not failures:
        if found == work:
            return f"{case}: {found:g} is the work alone; the saves take time too."
        if found in (work + (saves + 1) * cost, work + (work // interval) * cost):
            return f"{case}: {found:g} counts a save after the last piece, too."
        return f"{case}: three pieces at most are followed by a save, so it takes {differ(wanted, found, digits=6)}."
    if found == wanted - restart * len(failures) or (
        len(failures) > 1 and found == wanted - restart * (len(failures) - 1)
    ):
        return f"{case}: {found:g} leaves out the time of a restart."
    if found == work + saves * cost + restart * len(failures):
        return f"{case}: {found:g} loses no work. What was computed since the last save is lost."
    if found == sum(failures) + restart * len(failures) + work + saves * cost:
        return f"{case}: {found:g} begins anew after each failure. What was saved need not be done again."
    told = f"{case}: it takes {differ(wanted, found, digits=6)}."
    if found == _other_total(work, interval, cost, restart, failures, piece=interval):
        return f"{told} A save that is not complete does not count."
    if found in [
        _other_total(work, interval, cost, restart, failures, stops=False, least=least) for least in (0, None)
    ]:
        return f"{told} If the work is done before the next failure, the run ends there."
    if found == _other_total(work, interval, cost, restart, failures, forgets=True):
        return f"{told} What earlier starts have saved still counts at a later start."
    return f"{told} Follow one start after the other, up to its failure."


def _other_total(
    work: int,
    interval: int,
    cost: int,
    restart: int,
    failures: Sequence[int],
    piece: int | None = None,
    stops: bool = True,
    least: int | None = None,
    forgets: bool = False,
) -> float:
    """The time of a run, with a mistake: `piece` minutes are enough for a piece and its save, the run does not stop
    when its work is done (the rest is then at least `least`), or it forgets earlier saves."""
    time = done = 0
    for up in failures:
        left = work - done
        if stops and left + (math.ceil(left / interval) - 1) * cost <= up:
            break
        done = (0 if forgets else done) + up // (piece or interval + cost) * interval
        time += up + restart
    left = work - done
    if least is not None:
        left = max(left, least)
        return time + max(least, left + (math.ceil(left / interval) - 1) * cost)
    return time + left + (math.ceil(left / interval) - 1) * cost


# -- hangs
GRID = {"tp0": [0, 1], "tp1": [2, 3], "dp0": [0, 2], "dp1": [1, 3]}
HANGS: list[tuple[dict[int, str | None], dict[str, list[int]]]] = [
    ({0: "world", 1: None, 2: "world"}, {"world": [0, 1, 2]}),
    ({0: "tp0", 1: "dp1", 2: None, 3: None}, GRID),
    ({0: "dp0", 1: "dp1", 2: None, 3: None}, GRID),
    ({0: None, 1: None, 2: None, 3: None}, GRID),
    # a circle: rank 0 waits for 1, 1 for 3, 3 for 2, and 2 for 0
    ({0: "tp0", 1: "dp1", 2: "dp0", 3: "tp1"}, GRID),
    ({3: "world", 2: "world", 1: "world", 0: None}, {"world": [3, 2, 1, 0]}),
    ({0: None, 1: None, 2: "b", 3: "b"}, {"a": [0, 1], "b": [2, 3, 1]}),
]


@exercise(
    "First find the groups in which somebody waits. A rank of such a group is either in a collective itself, where it "
    "waits for others, or in none.",
    "`{group for group in waiting.values() if group is not None}` are these groups. Which of their ranks have None?",
)
def suspects(answer: Callable[[dict[int, str | None], dict[str, list[int]]], Sequence[int]]) -> None:
    """`answer(waiting, groups)` is the ranks in no collective for which somebody waits."""
    for waiting, groups in HANGS:
        held = {rank for group in waiting.values() if group is not None for rank in groups[group]}
        wanted = sorted(rank for rank in held if waiting[rank] is None)
        told = f"waiting {waiting}, groups {groups}"
        with trying(told):
            found = returned(answer(copy.deepcopy(waiting), copy.deepcopy(groups)))
        found = read(found, [int], "A list of ranks is wanted")
        for rank in found:
            require(rank in waiting, f"{told}: there is no rank {rank}.")
            require(
                waiting[rank] is None,
                f"{told}: rank {rank} waits itself, in {waiting[rank]}; look at those for which it waits.",
            )
            require(rank in held, f"{told}: rank {rank} is in no collective, but nobody waits for it.")
        require(found == wanted, f"{told}: the ranks are {wanted}, each once and in order, not {shown(found)}.")
    right("Its stack says why it does not come. The others are healthy.")
