"""The static picture of a view of sharded models, as the sharding panel draws it.

For each model: its meshes, a bar for each rank against the unsharded model, and a row for each parameter. In a row each
rank has a box that stands for the whole parameter, filled where the rank holds it. A vector's box is narrow; dimension
0 runs down. What a rank has gathered at the moment is amber.
"""

from __future__ import annotations

from rpcbench.base.charts import CODE, LETTER, STRONG, Columns, Picture, shorten_words
from rpcbench.base.errors import count_noun, format_bytes
from rpcbench.base.ids import Row
from rpcbench.telemetry.shard_views import (
    SHARD_PARTS,
    SHARD_WAYS,
    element_coordinates,
    rank_words,
    shape_words,
    sharing_words,
)
from rpcbench.telemetry.views import View

MOST_ROWS = 60
"""Parameters that a picture has at most: a committed notebook stores it as text."""
# Lengths are pixels of the picture.
_LEFT, _RIGHT, _TOP = 282, 12, 52  # beside the columns, and above the first model
_ROW, _WIDE, _TALL, _NARROW = 34, 40, 26, 12  # a row; a box for a matrix; the width of one for a vector
_BAR = 9
_CELL_WIDE, _CELL_TALL = 84, 20  # of a mesh
_TEXT_ROOM = 120  # a column at least as wide has words beside its box


def draw_shards(picture: Picture, view: View, _at: Columns) -> None:
    """Draw all watched models, one below the other."""
    y: float = _TOP
    left = MOST_ROWS
    for model in view["models"].values():
        y = _draw_model(picture, view, model, y, left) + 24
        left = max(0, left - model["params"])


def _draw_model(picture: Picture, view: View, model: Row, y: float, most: int) -> float:
    name = model["model"]
    picture.draw_text(12, y, shorten_words(f"{name}, {model['kind']}", 34), "strong")
    params = [(key, row) for key, row in view["params"].items() if row["model"] == name]
    ranks = sorted((row for row in view["ranks"].values() if row["model"] == name), key=_by_rank)
    sizes = [
        (mark.colour, f"{format_bytes(model[column])} {mark.name}")
        for column, mark in SHARD_PARTS.items()
        if model[column]
    ]
    _draw_legend(picture, "unsharded:", sizes, y)
    marks = [SHARD_WAYS[sharing] for sharing in dict.fromkeys(row["way"] for _, row in params)]
    legend_items = [(mark.colour, mark.piece) for mark in marks]
    legend_items += [("amber", "gathered now")] if any(rank["most"] for rank in ranks) else []
    _draw_legend(picture, "in a box:", list(dict.fromkeys(legend_items)), y + 18)
    y += 28
    for mesh in view["meshes"].values():
        if mesh["model"] == name:
            y = _draw_mesh(picture, view, mesh, y) + 10
    step = (picture.width - _LEFT - _RIGHT) / max(1, len(ranks))
    for n, rank in enumerate(ranks):
        _draw_rank_head(picture, view, model, rank, _LEFT + n * step, step, y)
    y += 66
    for key, param in params[:most]:
        picture.draw_rect(4, y, picture.width - 8, 1, "plate")
        _draw_param(picture, param, y)
        for n, rank in enumerate(ranks):
            if (piece := view["pieces"].get(f"{key}/{rank['worker']}")) is not None:
                _draw_piece(picture, param, piece, _LEFT + n * step, step, y)
        y += _ROW
    if len(params) > most:
        picture.draw_text(12, y + 15, f"… and {count_noun(len(params) - most, 'parameter')} more, not drawn", "note")
        y += 20
    for remark in view["remarks"].values():
        if remark["model"] == name:
            picture.draw_text(12, y + 15, shorten_words(remark["words"], int(picture.width / LETTER) - 4), "note")
            y += 18
    return y


def _draw_legend(picture: Picture, title: str, items: list[tuple[str, str]], y: float) -> None:
    picture.draw_text(_LEFT, y, title, "note")
    x = _LEFT + 80.0
    for colour, words in items:
        picture.draw_rect(x, y - 10, 10, 10, f"f-{colour}", 1)
        picture.draw_text(x + 15, y, words, "note")
        x += 30 + LETTER * len(words)


def _by_rank(row: Row) -> tuple[int, int]:
    return (row["worker"] if row["rank"] is None else row["rank"], row["worker"])


def _draw_mesh(picture: Picture, view: View, mesh: Row, y: float) -> float:
    """Draw a mesh as a grid: its last dimension across, the one before down, the others as grids side by side."""
    shape: list[int] = [1] * (2 - len(mesh["shape"])) + mesh["shape"]
    *outer, down, across = shape
    names = [""] * (2 - len(mesh["names"])) + mesh["names"]
    picture.draw_text(12, y + 14, "DeviceMesh", "note")
    dims = ", ".join(f"{name}={count}" for name, count in zip(mesh["names"], mesh["shape"], strict=True))
    picture.draw_text(12, y + 30, dims, "strong")
    picture.draw_text(_LEFT, y + 12, f"{names[-1]} →", "note")
    if names[-2]:
        picture.draw_text(_LEFT - 8, y + 32, f"{names[-2]} ↓", "note end")
    many = len(mesh["ranks"]) > 16
    wide, tall = (30, 18) if many else (_CELL_WIDE, _CELL_TALL)
    for index, (rank, worker) in enumerate(zip(mesh["ranks"], mesh["workers"], strict=True)):
        at = element_coordinates(index, mesh["shape"])
        at = [0] * (2 - len(at)) + at
        plate = 0
        for count, coordinate in zip(outer, at[:-2], strict=True):
            plate = plate * count + coordinate
        x = _LEFT + plate * (across * wide + 14) + at[-1] * wide
        top = y + 18 + at[-2] * tall
        picture.draw_rect(x, top, wide - 2, tall - 2, "plate")
        who = "?" if worker is None else str(view["workers"][str(worker)]["name"])
        picture.draw_text(
            x + wide / 2 - 1, top + tall - 7, rank if many else shorten_words(f"{rank} {who}", 12), "middle"
        )
    return y + 18 + down * tall


def _draw_rank_head(picture: Picture, view: View, model: Row, rank: Row, x: float, step: float, y: float) -> None:
    """Draw the head of a column: the rank, and a bar of its bytes whose frame is the unsharded model."""
    room, name = int((step - 6) / LETTER), str(view["workers"][str(rank["worker"])]["name"])
    picture.draw_text(x, y + 14, shorten_words(name, int((step - 6) / STRONG)), "strong")
    picture.draw_text(x, y + 30, shorten_words(rank_words(rank), room), "note")
    whole = sum(model[column] for column in SHARD_PARTS)
    wide, at = step - 12, x
    for column, colour in (*((column, mark.colour) for column, mark in SHARD_PARTS.items()), ("gathered", "amber")):
        part = min(wide * rank[column] / max(1, whole), x + wide - at)
        picture.draw_rect(at, y + 36, part, _BAR, f"f-{colour}", 0)
        at += part
    picture.draw_rect(x, y + 36, wide, _BAR, "line s-dim", 0)
    own = sum(rank[column] for column in SHARD_PARTS)
    picture.draw_text(
        x, y + 59, shorten_words(format_bytes(own) + (f", {own / whole:.0%}" if whole else ""), room), "note"
    )


def _draw_param(picture: Picture, param: Row, y: float) -> None:
    picture.draw_text(12, y + 14, shorten_words(param["name"], int((_LEFT - 20) / CODE)), "code strong")
    shape = f"{shape_words(param['shape'])} {sharing_words(param)}"
    picture.draw_text(12, y + 29, shorten_words(shape, int((_LEFT - 20) / LETTER)), "note")


def _draw_piece(picture: Picture, param: Row, piece: Row, x: float, step: float, y: float) -> None:
    wide = min(_WIDE if len(piece["shape"]) > 1 else _NARROW, step - 6)
    tall = _TALL if piece["shape"] else _NARROW
    top = y + (_ROW - tall) / 2 + 1
    if piece["now"]:
        _fill_share(picture, piece["lit"], x, top, wide, tall, "f-amber")
    _fill_share(picture, piece["block"], x, top, wide, tall, f"f-{SHARD_WAYS[param['way']].colour}")
    picture.draw_rect(x, top, wide, tall, "line s-dim", 1)
    if step >= _TEXT_ROOM:
        beside = x + _WIDE + 8
        room = int((step - _WIDE - 12) / LETTER)
        picture.draw_text(
            beside, y + 14, shorten_words(shape_words(piece["size"]) if piece["parameter"] else piece["words"], room)
        )
        picture.draw_text(
            beside, y + 29, shorten_words(format_bytes(sum(piece[column] for column in SHARD_PARTS)), room), "note"
        )


def _fill_share(picture: Picture, share: list[float], x: float, y: float, wide: float, tall: float, kind: str) -> None:
    left, top, width, height = share
    if width and height:
        # At least a pixel and a half, so that a thin piece of a large parameter is seen.
        picture.draw_rect(x + left * wide, y + top * tall, max(1.5, width * wide), max(1.5, height * tall), kind, 0)
