"""Worlds as the collector gives them, for tests of the panels."""

from __future__ import annotations

from math import prod
from typing import Any

from rpcbench.base.ids import Row
from rpcbench.runtime.metrics import MetricLog
from rpcbench.telemetry.collector import _ended_rows
from rpcbench.telemetry.log_view import LevelFinder
from rpcbench.telemetry.message_views import gather
from rpcbench.telemetry.views import World


def world(count: int, names: list[str] | None = None) -> World:
    """The notebook and `count` workers, with empty tables."""
    names = names or ["notebook", *(f"worker{i}" for i in range(1, count + 1))]
    return {i: _worker(i, name) for i, name in enumerate(names)}


def _worker(i: int, name: str) -> dict[str, Any]:
    tables = {table: {} for table in ("owned", "users", "contexts", "graphs", "calls", "steps", "ops")}
    return {"name": name, "id": i, "incarnation": 0, "state": "up", "tables": tables, "left_out": 0}


def own(
    at: World, owner: int, rref: str, kind: str = "Tensor", ready: bool = True, failed: bool = False, **known: Any
) -> None:
    at[owner]["tables"]["owned"][rref] = {
        "rref": rref, "ready": ready, "failed": failed, "type": kind, "forks": [], "made": 1.0, "size": None,
        "cell": "", "number": None, **known,
    }  # fmt: skip


def use(at: World, holder: int, fork: str, rref: str, owner: int, state: str = "confirmed", parent: int | None = None):
    at[holder]["tables"]["users"][fork] = {
        "rref": rref, "fork": fork, "owner": owner, "parent": parent, "state": state, "children": [],
        "type": "Tensor",
    }  # fmt: skip
    if state == "confirmed":
        at[owner]["tables"]["owned"][rref]["forks"].append({"fork": fork, "holder": holder})


def tell(at: World, worker: int, question: int = 9, **figures: Any) -> None:
    """What a member says of itself."""
    row = {
        "question": question, "pid": 100 + worker, "host": "h", "cpu": 0.25, "memory": 20_000_000,
        "ram": 25_200_000_000, "busy": 0, "waiting": 0, "queued": 0, "cells": 0, "peers": {}, **figures,
    }  # fmt: skip
    at[worker]["tables"]["health"] = {str(worker): row}


def sample(
    at: World, second: int, cpu: dict[int, float], step: int = 1, began: tuple[int, ...] = (), **more: Any
) -> None:
    """The figures of members in a second, as the notebook keeps them."""
    of = {"cpu": cpu, "memory": dict.fromkeys(cpu, 3e8), "bytes": {i: 1e6 * (1 + i) for i in cpu}, **more}
    of = {key: {str(i): value for i, value in figures.items()} for key, figures in of.items()}
    limits = {"cpu": 4, "memory": 25_200_000_000}
    row = {"at": second, "step": step, "began": list(began), "of": of, "limits": limits}
    at[0]["tables"].setdefault("samples", {})[f"{step}/{second}"] = row


def flow(at: World, sender: int, to: dict[int, tuple[int, ...]], host: str = "h", silent: bool = False) -> None:
    """What a member has sent, by receiver: bytes in the last second, in a second of ten, all, and in shared memory."""
    flows = {str(i): list(figures) for i, figures in to.items()}
    row = {"from": sender, "host": host, "silent": silent, "to": flows}
    at[0]["tables"].setdefault("traffic", {})[str(sender)] = row


def launch(at: World, worker: int, name: str = "", state: str = "ready", log: str = "") -> None:
    """What the notebook says of a process that it has started."""
    row = {"name": name or f"worker{worker}", "pid": 100 + worker, "incarnation": 0, "state": state, "log": log}
    at[0]["tables"].setdefault("launched", {})[str(worker)] = row


def say(at: World, worker: int, *lines: str, kind: str = "", seen: float | None = 1000.0, **log: Any) -> None:
    """Lines that a worker wrote outside cells, or a line of the panel's own."""
    tables = at[worker]["tables"]
    blocks = tables.setdefault("log_lines", {})
    order = 1 + sum(len(member["tables"].get("log_lines", {})) for member in at.values())
    usual = {"name": at[worker]["name"], "path": f"/logs/{worker}.0.log", "missing": "", "lost": "", "skipped": 0}
    file = {**usual, "lines": 0, **tables.get("log_files", {}).get(str(worker), {}), **log}
    if lines:
        levels = LevelFinder().find_levels(lines)
        about = {"worker": worker, "kind": kind, "first": file["lines"], "order": order, "at": seen}
        blocks[f"{worker}.{order}"] = {**about, "lines": [*lines], "levels": levels}
    tables["log_files"] = {str(worker): {**file, "lines": file["lines"] + len(lines)}}


def ask(at: World, action: str, target: str, error: str = "") -> None:
    """An action that runs, or has failed."""
    row = {"action": action, "target": target, "state": "failed" if error else "runs", "error": error}
    at[0]["tables"].setdefault("actions", {})[f"{action} {target}"] = row


def record(at: World, context: int, pairs: list[tuple[int, int, int]], gradients: dict[int, int]) -> None:
    """`pairs` are (message, from, to); both halves are recorded. Each worker sends on what it received, in order."""
    for worker, held in gradients.items():
        sends = [{"message": message, "to": to} for message, source, to in pairs if source == worker]
        recvs = [{"message": message, "from": source} for message, source, to in pairs if to == worker]
        row = {"context": context, "known": [other for other in gradients if other != worker], "sends": sends}
        row |= {"recvs": recvs, "passes": [], "gradients": held}
        at[worker]["tables"]["contexts"][str(context)] = row
        leaves = [{"name": f"{i}.weight", "shape": "[64, 64]", "bytes": 16384} for i in range(min(held, 64))]
        about = {"label": "forward", "shape": "[8, 64]", "bytes": 2048, "back": None}
        inputs = [[recv["message"]] for recv in recvs] + [[]] * len(sends)
        parts = [part([send["message"]], recv) for send, recv in zip(sends, inputs, strict=False)]
        at[worker]["tables"]["graphs"][str(context)] = {
            "context": context, "leaves": leaves, "more": held - len(leaves), "gradients": held, "passes": [],
            "made": 5.0, "ended": None, "sends": [{**send, **about} for send in sends], "recvs": recvs, "parts": parts,
        }  # fmt: skip


def part(sends: list[int], recvs: list[int], *ops: str, ran: tuple[float, ...] = ()) -> dict[str, Any]:
    """A part of a worker's graph."""
    ops = ops or ("Linear 0", "Relu")
    return {"sends": sends, "recvs": recvs, "ops": list(ops), "count": len(ops), "ran": list(ran)}


def run_backward(at: World, context: int, name: str, worker: int, needed: int, arrived: int, state: str = "running"):
    """A pass with a region for each two gradients needed. The first gradients have come, and their parts have run."""
    row = {"pass": name, "state": state, "needed": needed, "arrived": arrived, "waiting": needed - arrived}
    at[worker]["tables"]["contexts"][str(context)]["passes"].append(row)
    graph = at[worker]["tables"]["graphs"][str(context)]
    if state == "running":
        graph["passes"].append({"pass": name, "regions": needed // 2, "ran": arrived // 2})
        graph["sends"] = [{**send, "back": 6.0} if i < arrived else send for i, send in enumerate(graph["sends"])]
        graph["parts"] = [{**one, "ran": [6.0, 6.0015]} if i < arrived else one for i, one in enumerate(graph["parts"])]


def release(at: World, context: int, *workers: int) -> None:
    """A context is released, on these workers or on all that have it."""
    for worker in workers or [id_ for id_, member in at.items() if str(context) in member["tables"]["contexts"]]:
        tables = at[worker]["tables"]
        del tables["contexts"][str(context)]
        graph = tables["graphs"][str(context)]
        tables["graphs"][str(context)] = {**graph, "passes": [], "ended": 7.0}


def gpipe(at: World, step: int, stages: int, batches: int, start: float, until: float = float("inf")) -> float:
    """Ops of one GPipe step: a forward takes 3 ms, a backward 5 ms; those after `until` have not happened yet."""
    forward = {(s, m): start + 0.003 * (s + m) + 0.0004 * s for s in range(stages) for m in range(batches)}
    turn = start + 0.003 * (stages + batches) + 0.001
    back = {(s, m): turn + 0.005 * (stages - 1 - s + m) for s in range(stages) for m in range(batches)}
    ideal = (stages - 1) / (stages - 1 + batches)
    for s in range(stages):
        plan = [f"{s}{op}{m}" for op in "FB" for m in range(batches)]
        done = back[s, batches - 1] + 0.0048 <= until
        at[s + 1]["tables"]["steps"][f"s{step}.w{s + 1}"] = {
            "step": step, "worker": s + 1, "workers": [i + 1 for i in range(stages)], "plan": plan, "ideal": ideal,
            "state": "done" if done else "running",
        }  # fmt: skip
        ops = [("F", m, forward[s, m], 0.0028) for m in range(batches)] + [
            ("B", m, back[s, m], 0.0048) for m in range(batches)
        ]
        for i, (op, m, begin, last) in enumerate(ops):
            if begin < until:
                at[s + 1]["tables"]["ops"][f"s{step}.w{s + 1}.{i}"] = {
                    "step": step, "worker": s + 1, "stage": s, "op": op, "microbatch": m,
                    "begin": begin, "end": begin + last if begin + last <= until else None, "bytes": 4096,
                    "held": 300_000 * (i + 1 if op == "F" else 2 * batches - 1 - i), "failed": False,
                }  # fmt: skip
    return max(begin + 0.0048 for begin in back.values())


def send(at: World, source: int, to: int, kind: str, sent: float, took: float | None = 0.0002, **more: Any) -> str:
    """A message and, unless it took None, that it has come; its key."""
    rows = at[source]["tables"].setdefault("messages", {})
    number = len(rows)
    about = {"call": more.pop("call", None), "rrefs": more.pop("rrefs", []), "context": more.pop("context", 0)}
    about |= {"label": more.pop("label", ""), "bytes": more.pop("bytes", 0)}
    gather(rows, source, [("sent", to, number, sent, kind, *about.values())])
    key = f"{source}>{to}.{number:x}"
    if took is not None:
        arrive(at, key, sent + took)
    return key


def watch(at: World, worker: int, rank: int, world: int, name: str = "model", **more: Any) -> None:
    """A worker watches a model of two parameters: a matrix of which each rank has some rows, and a copy of a vector."""
    mesh = [["dp"], [world], list(range(world))]
    at[worker]["tables"].setdefault("models", {})[name] = {
        "model": name, "stage": None, "kind": "Net", "rank": rank, "world": world, "parameters": 2, "remarks": [],
        "meshes": [mesh], "steps": 0, "gathered": 0, "most": 0, "groups": [[False, 0]], **more,
    }  # fmt: skip
    rows = 12 // world
    shard(at, worker, f"{name}/up.weight", 0, [12, 8], [rank * rows, 0], [rows, 8], ["Shard(0)"], 0)
    shard(at, worker, f"{name}/up.bias", 1, [12], [0], [12], ["Replicate"])


def shard(
    at: World, worker: int, key: str, order: int, shape: list[int], offset: list[int], size: list[int],
    placements: list[str], group: int | None = None, **more: Any,
) -> None:  # fmt: skip
    """The piece of a parameter that a worker has, of four bytes an element."""
    kind = "plain" if not placements else "replicated" if set(placements) == {"Replicate"} else "sharded"
    at[worker]["tables"].setdefault("shards", {})[key] = {
        "name": key.partition("/")[2], "also": [], "order": order, "group": group, "kind": kind, "shape": shape,
        "offset": offset, "size": size, "gathered": None if group is None else [[0] * len(shape), shape],
        "dtype": "float32", "placements": placements, "over": ["dp", "tp"][: len(placements)], "device": "cpu",
        "trainable": True, "bytes": 4 * prod(size), "whole": 4 * prod(shape), "gradient": 0, "state": 0, **more,
    }  # fmt: skip


def job(at: World, order: int, name: str = "score", **more: Any) -> None:
    """A job of the notebook: a map that runs, of which 12 of 20 items are done, one has failed, and two run."""
    at[0]["epoch"] = 1_700_000_000.0
    at[0]["tables"].setdefault("jobs", {})[str(order)] = {
        "order": order, "kind": "map", "name": name, "unit": "item", "total": 20, "cell": f"cell-{order}",
        "number": order, "running": 2, "done": 12, "failed": 1, "cancelled": 0, "state": "runs", "error": "",
        "note": "", "began": 50.0, "end": None, "counted": 60.0, "rate": 1.3, **more,
    }  # fmt: skip


def logged(
    at: World, worker: int, name: str, values: list[float | str], first: int = 0, order: int = 0, since: float = 0.0
) -> None:
    """What a rank has logged: the values of steps from `first` on, as text if they are not finite; a step a second."""
    kept = MetricLog()
    kept.last_step = first - 1
    for value in values:
        kept.add_values({name: float(value)}, kept.last_step + 1)
    rows = at[worker]["tables"].setdefault("metrics", {})
    times = [since, since + len(values) - 1]
    rows |= {f"{order}.{row['block']}": {**row, "order": order, "times": times} for row in kept.table().values()}


def restarted(at: World, worker: int) -> None:
    """The member is lost and started again, as the collector tells it: its rows of metrics stay, with its number."""
    tables = at[worker]["tables"]
    tables["metrics"] = _ended_rows(tables, at[worker]["incarnation"])["metrics"]
    at[worker] |= {"incarnation": at[worker]["incarnation"] + 1, "state": "up"}


def ran(at: World, order: int, *parts: list[Any], code: str = "y = x.sum()\ny", **more: Any) -> None:
    """A cell that the notebook has sent; of each worker: id, name, state, error, end, number of its prompt, seconds."""
    at[0]["epoch"] = 1_700_000_000.0
    at[0]["tables"].setdefault("cells", {})[str(order)] = {
        "order": order, "code": code, "is_cut": False, "cell": f"cell-{order}", "number": order, "began": 50.0,
        "parts": list(parts) or [[1, "worker1", "ok", "", 51.5, 8, 1.2]], **more,
    }  # fmt: skip


LAYOUTS = {
    "tp Shard(1)": [[[0.0, 0.0, 0.5, 1.0]], [[0.5, 0.0, 0.5, 1.0]]] * 2,
    "tp Replicate": [[[0.0, 0.0, 1.0, 1.0]]] * 4,
    "on rank 0": [[[0.0, 0.0, 1.0, 1.0]], None, None, None],
}


def compare(at: World, *values: Row, first: str = "", **more: Any) -> None:
    """The notebook's last comparison, of these values: the rows that `value` makes, under their numbers."""
    ok = not any(row["word"] == "wrong" for row in values)
    words = "Right: the ranks compute what one process computes." if ok else "Wrong, first at forward up: no reduction."
    mesh: Row = {"names": ["dp", "tp"], "sizes": [2, 2]}
    report = {**mesh, "ok": ok, "values": len(values), "words": words, "first": first, "ranks": [0, 1], **more}
    layouts = {key: {**mesh, "words": key, "boxes": boxes, "summed": False} for key, boxes in LAYOUTS.items()}
    verdicts = {str(n): {**row, "order": n} for n, row in enumerate(values)}
    at[0]["tables"] |= {"comparisons": {"0": report}, "verdicts": verdicts, "layouts": layouts}


def value(phase: str, name: str, word: str = "right", layout: str = "tp Replicate", **more: Any) -> Row:
    """A value of a comparison."""
    error = 2.5 if word == "wrong" else 0.0
    return {
        "step": 0, "phase": phase, "name": name, "part": "", "call": None, "word": word, "layout": layout,
        "words": layout, "error": error, "allowed": 1e-6, "norm": 4.0, "factor": 1.0, "shape": [4, 2],
        "dtype": "float32", "ranks": [0, 1, 2, 3], "missing": [], "errors": [[n, error * (n > 1)] for n in range(4)],
        "maps": [], "largest": None, **more,
    }  # fmt: skip


def arrive(at: World, key: str, time: float) -> None:
    """A message has come."""
    ends, number = key.split(".")
    source, to = map(int, ends.split(">"))
    row = at[source]["tables"]["messages"][key]
    about = (row["kind"], None, row["rrefs"], int(row["context"] or 0), row["label"], row["bytes"])
    gather(at[to]["tables"].setdefault("messages", {}), to, [("received", source, int(number, 16), time, *about)])


def meet(
    at: World, number: int, begins: dict[int, float], end: float | None, op: str = "all_reduce(SUM)", **more: Any
) -> str:
    """A collective of all workers, which these have entered; its key. All leave at once, unless `end` is None."""
    key, members = f"w.0.{number}", [member["name"] for id_, member in at.items() if id_]
    about = {"group": "world", "number": number, "op": op, "members": members, "shape": "float32[4]", "bytes": 16}
    for worker, begin in begins.items():
        times = {"begin": begin, "end": end, "failed": False}
        at[worker]["tables"].setdefault("collectives", {})[key] = {**about, **times, **more}
    return key
