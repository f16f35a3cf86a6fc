"""The view of the sharding panel: a pure function from the tables "models" and "shards" of all members, and its words.

A model is the same one on all members that watch one under its name. A parameter is the same one where its name (and
its pipeline stage) is the same. Differences between members are told in sentences, section `remarks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import count_noun, format_bytes
from rpcbench.base.ids import Row, Table
from rpcbench.telemetry.views import View, World, living_members, remark_rows, rows_of, worker_rows


class ShardMark(NamedTuple):
    """Something that panels and pictures of models draw with a colour of its own."""

    colour: str
    name: str  # in texts
    piece: str = ""  # of one rank, in tooltips and legends


SHARD_PARTS = {
    "parameter": ShardMark("blue", "parameters"),
    "gradient": ShardMark("green", "gradients"),
    "state": ShardMark("purple", "optimizer state"),
}
"""The parts of the bytes of a rank."""
SHARD_WAYS = {
    "sharded": ShardMark("blue", "sharded", "a piece"),
    "replicated": ShardMark("blue", "copies kept equal", "a copy, kept equal on all ranks"),
    "partial": ShardMark("red", "partial sums", "a part of a sum"),
    "plain": ShardMark("dim", "plain copies", "a copy that nothing keeps equal"),
    "alone": ShardMark("blue", "on one rank only", "on one rank only"),
    "flat": ShardMark("dim", "flat (FSDP1)", "a part of FSDP1's flat parameter"),
    "mixed": ShardMark("red", "kept differently on different ranks", "kept differently on other ranks"),
}
"""How the ranks share a parameter; amber means gathered, and nothing else does."""
_LINE = 160  # characters of a parameter's line of text


def shards_view(world: World) -> View:
    """Return the pieces of watched models. Sections: workers, models, ranks, meshes, params, pieces, remarks.

    `models`: sums over all members, `whole` bytes of the unsharded model by column (parameter, gradient, state).
    `ranks` (`model/worker`): bytes that a member holds by column, bytes `gathered` now beyond its own pieces, and at
    `most`; its `rank`, `places` in the mesh in words, and optimizer `steps`. `params` (`model/name`): shape, type and
    placements in words, and `sharing`: how the members share it: `sharded`, `replicated`, `partial`, `flat`, `plain`
    (copies that nothing keeps equal), `alone` (on one member only), or `mixed`. `pieces` (`model/name/worker`): the
    `size` of the block that a member holds, where this `block_in_box` and the one that is gathered, `lit`, stand in a
    box for the parameter ([x, y, width, height], shares of the box), whether it is gathered `now`, how many `times` it
    was, its bytes by column, and `words`. `remarks`: sentences.
    """
    there = living_members(world)
    models = [(worker, row) for worker, _, row in rows_of(there, "models")]
    watched = {row["model"] for _, row in models}
    lost = [(n, row) for n, _, row in rows_of(world, "models") if n not in there and row["model"] in watched]
    pieces = list(_piece_rows(there, {(worker, _model_key(row)): row for worker, row in models}))
    params = _param_rows(pieces)
    return {
        "workers": worker_rows(world, ()),
        "models": _model_rows(models, params, pieces),
        "ranks": _rank_rows(models, pieces),
        "meshes": _mesh_rows([*models, *lost]),
        "params": params,
        "pieces": {f"{row['param']}/{row['worker']}": row for row in pieces},
        "remarks": {str(n): row for n, row in enumerate(_remark_rows(world, models, lost, params, pieces))},
    }


def _model_key(model: Row) -> str:
    """Return the key of a row of the table "models"."""
    return model["model"] if model["stage"] is None else f"{model['model']} {model['stage']}"


# -- pieces
def _piece_rows(there: World, models: dict[tuple[int, str], Row]) -> Iterator[Row]:
    for worker, key, row in rows_of(there, "shards"):
        model = models.get((worker, key.partition("/")[0]))
        if model is None:  # its row has not come yet
            continue
        group = model["groups"][row["group"]] if row["group"] is not None else [False, 0]
        stage = model["stage"]
        name = row["name"] if stage is None else f"stage {stage}: {row['name']}"
        now = bool(group[0]) and row["gathered"] is not None
        is_meta = row["device"] == "meta"
        words = "no memory yet" if is_meta else block_words(row["offset"], row["size"], row["shape"])
        yield {
            "worker": worker, "model": model["model"], "param": f"{model['model']}/{name}", "name": name,
            "stage": stage, "order": row["order"], "also": row["also"], "kind": row["kind"], "shape": row["shape"],
            "dtype": row["dtype"], "device": row["device"], "trainable": row["trainable"],
            "placed": _placement_words(row), "size": row["size"],
            "block": [0.0] * 4 if is_meta else block_in_box(row["offset"], row["size"], row["shape"]),
            "lit": block_in_box(row["gathered"][0], row["gathered"][1], row["shape"]) if row["gathered"] else None,
            "now": now, "times": group[1], "whole": row["whole"], "parameter": row["bytes"],
            "gradient": row["gradient"], "state": row["state"], "words": words,
        }  # fmt: skip


def _placement_words(row: Row) -> str:
    """Return the placements in words: `dp: Shard(0), tp: Replicate`."""
    return ", ".join(f"{over}: {placement}" for placement, over in zip(row["placements"], row["over"], strict=False))


def block_words(offset: list[int], size: list[int], shape: list[int]) -> str:
    """Return a block of a parameter in words: `rows 16 to 31 of 64`, `all of it`, `nothing`."""
    if 0 in size and 0 not in shape:
        return "nothing"
    words = {0: "row", 1: "column"} if len(shape) > 1 else {0: "element"}
    parts = [
        _span_words(words.get(dim, f"index of dimension {dim}"), begin, count, all_)
        for dim, (begin, count, all_) in enumerate(zip(offset, size, shape, strict=True))
        if count < all_
    ]
    return ", ".join(parts) or "all of it"


def block_in_box(offset: list[int], size: list[int], shape: list[int]) -> list[float]:
    """Return where a block stands in a box for the parameter: [x, y, width, height], as shares of the box.

    Dimension 0 runs down. Across runs dimension 1, or a later one if that is the one that is divided.
    """
    divided = [dim for dim in range(1, len(shape)) if size[dim] < shape[dim]]
    across = divided[0] if divided else 1
    (y, height), (x, width) = (
        (offset[dim] / shape[dim], size[dim] / shape[dim]) if dim < len(shape) and shape[dim] else (0.0, 1.0)
        for dim in (0, across)
    )
    return [round(part, 4) for part in (x, y, width, height)]


def _span_words(word: str, begin: int, count: int, all_: int) -> str:
    plural = word.replace("index", "indices") if "index" in word else f"{word}s"
    return f"{word} {begin} of {all_}" if count == 1 else f"{plural} {begin} to {begin + count - 1} of {all_}"


# -- parameters
def _param_rows(pieces: list[Row]) -> Table:
    together: dict[str, list[Row]] = {}
    for piece in pieces:
        together.setdefault(piece["param"], []).append(piece)
    members: dict[str, set[int]] = {}
    for piece in pieces:
        members.setdefault(piece["model"], set()).add(piece["worker"])
    order = sorted(together, key=lambda key: (together[key][0]["stage"] or 0, together[key][0]["order"]))
    return {key: _param_row(together[key], n, len(members[together[key][0]["model"]])) for n, key in enumerate(order)}


def _param_row(pieces: list[Row], order: int, members: int) -> Row:
    first = pieces[0]
    kinds = {piece["kind"] for piece in pieces}
    sharing = "mixed" if len(kinds) > 1 else next(iter(kinds))
    if sharing == "plain" and len(pieces) == 1 and members > 1:
        sharing = "alone"
    differs = len({(*piece["shape"], piece["dtype"]) for piece in pieces}) > 1
    return {
        "model": first["model"], "name": first["name"], "also": first["also"], "order": order, "way": sharing,
        "shape": first["shape"], "dtype": first["dtype"], "placed": first["placed"], "differs": differs,
        "trainable": any(piece["trainable"] for piece in pieces), "whole": first["whole"],
    }  # fmt: skip


# -- models, ranks, meshes
def _model_rows(models: list[tuple[int, Row]], params: Table, pieces: list[Row]) -> Table:
    whole: dict[str, dict[str, int]] = {}
    for key, column, size in _unsharded_bytes(pieces):
        sums = whole.setdefault(params[key]["model"], dict.fromkeys(SHARD_PARTS, 0))
        sums[column] += size
    found: Table = {}
    for _, row in models:
        name = row["model"]
        own = [param for param in params.values() if param["model"] == name]
        found.setdefault(
            name,
            {"model": name, "kind": row["kind"], "params": len(own), **whole.get(name, dict.fromkeys(SHARD_PARTS, 0))},
        )
    return found


def _unsharded_bytes(pieces: list[Row]) -> Iterator[tuple[str, str, int]]:
    """Yield (parameter, column, bytes) of the model in one process."""
    together: dict[str, list[Row]] = {}
    for piece in pieces:
        together.setdefault(piece["param"], []).append(piece)
    for param, own in together.items():
        yield param, "parameter", max(piece["whole"] for piece in own)
        for column in ("gradient", "state"):
            yield param, column, _sum_blocks(own, column)


def _sum_blocks(pieces: list[Row], column: str) -> int:
    """Return the bytes of the gradients or states of a whole parameter: those of all its blocks, copies counted once.

    In proportion to the largest piece where some blocks have none, as in the middle of a backward pass."""
    held = [piece for piece in pieces if piece["parameter"]]
    blocks = {piece["words"]: piece for piece in held}.values()
    if all(piece[column] for piece in blocks) and sum(piece["parameter"] for piece in blocks) == pieces[0]["whole"]:
        empty = [piece for piece in pieces if not piece["parameter"]]  # may have a state, as Adam's count of its steps
        return sum(piece[column] for piece in (*blocks, *empty))
    largest = max(held, key=lambda piece: (piece[column], piece["parameter"]), default=None)
    return round(largest[column] * largest["whole"] / largest["parameter"]) if largest else 0


def _rank_rows(models: list[tuple[int, Row]], pieces: list[Row]) -> Table:
    found: Table = {}
    for worker, row in models:
        key = f"{row['model']}/{worker}"
        known = found.setdefault(
            key,
            {
                "worker": worker, "model": row["model"], "rank": row["rank"], "stages": [],
                "places": _position_words(row),
                **dict.fromkeys((*SHARD_PARTS, "gathered", "most", "steps", "left_out"), 0),
            },
        )  # fmt: skip
        known["stages"] += [] if row["stage"] is None else [row["stage"]]
        known["gathered"] += row["gathered"]
        known["most"] += row["most"]
        known["steps"] = max(known["steps"], row["steps"])
        known["left_out"] += row["parameters"]  # those that have rows are subtracted below
    for piece in pieces:
        rank = found[f"{piece['model']}/{piece['worker']}"]
        rank["left_out"] -= 1
        for column in SHARD_PARTS:
            rank[column] += piece[column]
    return found


def _position_words(model: Row) -> str:
    """Return the places of a rank in the first mesh: `dp 0, tp 1`; empty outside of it."""
    for names, shape, ranks in model["meshes"]:
        if model["rank"] in ranks:
            coordinates = element_coordinates(ranks.index(model["rank"]), shape)
            return ", ".join(f"{name} {at}" for name, at in zip(names, coordinates, strict=True))
    return ""


def element_coordinates(index: int, shape: Iterable[int]) -> list[int]:
    """Return the coordinates of the element with this index in row-major order."""
    found: list[int] = []
    for size in reversed(list(shape)):
        index, at = divmod(index, size)
        found.append(at)
    return found[::-1]


def _mesh_rows(models: list[tuple[int, Row]]) -> Table:
    """Return each mesh once: `names` and `shape` of its dimensions, `ranks`, and the worker of each rank or None."""
    at = {(row["model"], row["rank"]): worker for worker, row in models}
    found: Table = {}
    for _, row in models:
        for names, shape, ranks in row["meshes"]:
            key = f"{row['model']}/{','.join(names)}/{','.join(map(str, ranks))}"
            workers = [at.get((row["model"], rank)) for rank in ranks]
            found[key] = {"model": row["model"], "names": names, "shape": shape, "ranks": ranks, "workers": workers}
    return found


# -- sentences
def _remark_rows(
    world: World, models: list[tuple[int, Row]], lost: list[tuple[int, Row]], params: Table, pieces: list[Row]
) -> Iterator[Row]:
    """Yield the sentences on each model, and those that the world has: on all, of model ""."""
    yield from ({"model": "", **row} for row in remark_rows(world).values())
    names = {worker: str(member["name"]) for worker, member in world.items()}
    by_model: dict[str, list[tuple[int, Row]]] = {}
    for worker, row in models:
        by_model.setdefault(row["model"], []).append((worker, row))
    for name, rows in by_model.items():
        own = [param for param in params.values() if param["model"] == name]
        gone = {row["rank"]: world[worker] for worker, row in lost if row["model"] == name}
        said = [*_describe_missing(name, rows, gone), *_describe_restarted(name, rows, world)]
        said += [remark for _, row in rows for remark in row["remarks"]]
        said += _describe_differing(own, pieces, names)
        said += _describe_sharding(own, len({worker for worker, _ in rows}))
        if left_out := sum(row["parameters"] for _, row in rows) - sum(piece["model"] == name for piece in pieces):
            said.append(f"{count_noun(left_out, 'piece')} of this model have no row: there are too many.")
        yield from ({"model": name, "words": words} for words in dict.fromkeys(said))


def _describe_missing(name: str, rows: list[tuple[int, Row]], gone: dict[Any, dict[str, Any]]) -> Iterator[str]:
    """Yield sentences on the ranks of the process group that do not watch the model; members that did may be `gone`."""
    world = max(row["world"] for _, row in rows)
    ranks = {row["rank"] for _, row in rows}
    missing = [] if None in ranks else [rank for rank in range(world) if rank not in ranks]
    for rank in (rank for rank in missing if rank in gone):
        how = {"lost": "is lost", "left": "has left"}.get(gone[rank]["state"], "does not answer")
        yield f"rank {rank} of {name} is not shown: {gone[rank]['name']} {how}."
    if missing := [rank for rank in missing if rank not in gone]:
        which = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
        yield f"{which} not watch {name}: call rpcbench.watch_model there, too."


def _describe_restarted(name: str, rows: list[tuple[int, Row]], world: World) -> Iterator[str]:
    """Yield a sentence on each member that was started again and does not watch the model, though a rank is missing."""
    there = {worker for worker, _ in rows}
    if len(there) < max(row["world"] for _, row in rows):
        again = [row["name"] for n, row in living_members(world).items() if row["incarnation"] and n not in there]
        yield from (f"{one} was started again: what it had of {name} is lost." for one in again)


def _describe_differing(own: list[Row], pieces: list[Row], names: dict[int, str]) -> Iterator[str]:
    for param in own:
        if not param["differs"]:
            continue
        key = f"{param['model']}/{param['name']}"
        shapes = [f"{_shape_text(piece)} on {names[piece['worker']]}" for piece in pieces if piece["param"] == key]
        yield f"{param['name']} differs between ranks: {', '.join(shapes)}."


def _describe_sharding(own: list[Row], members: int) -> Iterator[str]:
    sharing_counts = Counter(param["way"] for param in own)
    if members > 1 and sharing_counts["plain"]:
        count = sharing_counts["plain"]
        some = f"{count_noun(count, 'parameter')} of it {'is' if count == 1 else 'are'}"
        which = "This model is" if count == len(own) else some
        yield f"{which} not sharded: each rank has a copy of its own, and nothing keeps the copies equal."
    frozen = sum(not param["trainable"] for param in own)
    if frozen:
        yield f"{count_noun(frozen, 'parameter')} of this model {'needs' if frozen == 1 else 'need'} no gradient."


def _shape_text(row: Row) -> str:
    return f"{row['dtype']} {row['shape'] or 'scalar'}"


# -- text
def shards_text(view: View) -> tuple[str, list[str]]:
    """Return the view as text: a line with the sum, and the other lines."""
    lines = [f"  {row['words']}" for row in view["remarks"].values() if not row["model"]]
    for name, model in view["models"].items():
        whole = ", ".join(
            f"{format_bytes(model[column])} {mark.name}" for column, mark in SHARD_PARTS.items() if model[column]
        )
        lines.append(
            f"  {name}, {model['kind']}: {count_noun(model['params'], 'parameter')}; unsharded {whole or '0 B'}"
        )
        lines += [f"    {_mesh_words(mesh)}" for mesh in view["meshes"].values() if mesh["model"] == name]
        ranks = [row for row in view["ranks"].values() if row["model"] == name]
        lines += [f"    {_rank_words(view, row, model)}" for row in ranks]
        lines += [f"    {row['words']}" for row in view["remarks"].values() if row["model"] == name]
    for key, param in view["params"].items():
        own = [piece for piece in view["pieces"].values() if piece["param"] == key]
        places = "; ".join(f"{_worker_name(view, piece['worker'])} {piece['words']}" for piece in own)
        sharing = param["placed"] or SHARD_WAYS[param["way"]].name
        lines.append(shorten_words(f"  {param['name']} {_shape_text(param)}, {sharing}: {places}", _LINE))
    watched = count_noun(len(view["models"]), "watched model")
    return f"{count_noun(len(view['workers']), 'member')}, {watched}", lines


def _mesh_words(mesh: Row) -> str:
    """Return a mesh in words: `DeviceMesh dp=2, tp=2: ranks 0, 1, 2, 3`."""
    dims = ", ".join(f"{name}={count}" for name, count in zip(mesh["names"], mesh["shape"], strict=True))
    return f"DeviceMesh {dims}: ranks {', '.join(map(str, mesh['ranks']))}"


def _place_words(row: Row) -> str:
    """Return a rank with its places: `rank 1, dp 0, tp 1`; empty outside of a process group."""
    rank = [] if row["rank"] is None else [f"rank {row['rank']}"]
    return ", ".join([*rank, *filter(None, [row["places"]]), *(f"stage {stage}" for stage in row["stages"])])


def _rank_words(view: View, row: Row, model: Row) -> str:
    parts = [
        f"{format_bytes(row[part])} {mark.name}{_share_text(row, model, part)}"
        for part, mark in SHARD_PARTS.items()
        if model[part]
    ]
    gathered = f"; gathers at most {format_bytes(row['most'])} at once" if row["most"] else ""
    where = f" ({words})" if (words := _place_words(row)) else ""
    return f"{_worker_name(view, row['worker'])}{where}: {', '.join(parts)}{gathered}"


def _share_text(row: Row, model: Row, column: str) -> str:
    return f" ({row[column] / model[column]:.0%})" if model[column] else ""


def _worker_name(view: View, worker: Any) -> str:
    return str(view["workers"][str(worker)]["name"])
