"""Worlds as the collector gives them, for tests of the panels."""

from __future__ import annotations

from typing import Any

from rpcbench.telemetry.views import World


def world(count: int, names: list[str] | None = None) -> World:
    """The notebook and `count` workers, with empty tables."""
    names = names or ["notebook", *(f"worker{i}" for i in range(1, count + 1))]
    return {i: _worker(i, name) for i, name in enumerate(names)}


def _worker(i: int, name: str) -> dict[str, Any]:
    tables = {table: {} for table in ("owned", "users", "contexts", "calls", "ops")}
    return {"name": name, "id": i, "incarnation": 0, "state": "up", "tables": tables, "left_out": 0}


def own(at: World, owner: int, rref: str, kind: str = "Tensor", ready: bool = True, failed: bool = False) -> None:
    at[owner]["tables"]["owned"][rref] = {
        "rref": rref, "ready": ready, "failed": failed, "type": kind, "forks": [], "made": 1.0,
    }  # fmt: skip


def use(at: World, holder: int, fork: str, rref: str, owner: int, state: str = "confirmed", parent: int | None = None):
    at[holder]["tables"]["users"][fork] = {
        "rref": rref, "fork": fork, "owner": owner, "parent": parent, "state": state, "children": [],
        "type": "Tensor",
    }  # fmt: skip
    if state == "confirmed":
        at[owner]["tables"]["owned"][rref]["forks"].append({"fork": fork, "holder": holder})


def record(at: World, context: int, pairs: list[tuple[int, int, int]], gradients: dict[int, int]) -> None:
    """`pairs` are (message, from, to); both halves are recorded."""
    for worker, held in gradients.items():
        at[worker]["tables"]["contexts"][str(context)] = {
            "context": context,
            "known": [other for other in gradients if other != worker],
            "sends": [{"message": message, "to": to} for message, source, to in pairs if source == worker],
            "recvs": [{"message": message, "from": source} for message, source, to in pairs if to == worker],
            "passes": [],
            "gradients": held,
        }


def run_backward(at: World, context: int, name: str, worker: int, needed: int, arrived: int, state: str = "running"):
    row = {"pass": name, "state": state, "needed": needed, "arrived": arrived, "waiting": needed - arrived}
    at[worker]["tables"]["contexts"][str(context)]["passes"].append(row)


def gpipe(at: World, step: int, stages: int, batches: int, start: float, until: float = float("inf")) -> float:
    """Ops of one GPipe step: a forward takes 3 ms, a backward 5 ms; those after `until` have not happened yet."""
    forward = {(s, m): start + 0.003 * (s + m) + 0.0004 * s for s in range(stages) for m in range(batches)}
    turn = start + 0.003 * (stages + batches) + 0.001
    back = {(s, m): turn + 0.005 * (stages - 1 - s + m) for s in range(stages) for m in range(batches)}
    for s in range(stages):
        ops = [("F", m, forward[s, m], 0.0028) for m in range(batches)] + [
            ("B", m, back[s, m], 0.0048) for m in range(batches)
        ]
        for i, (op, m, begin, last) in enumerate(ops):
            if begin < until:
                at[s + 1]["tables"]["ops"][f"s{step}.w{s + 1}.{i}"] = {
                    "step": step, "worker": s + 1, "stage": s, "op": op, "microbatch": m,
                    "begin": begin, "end": begin + last if begin + last <= until else None, "bytes": 4096,
                }  # fmt: skip
    return max(begin + 0.0048 for begin in back.values())
