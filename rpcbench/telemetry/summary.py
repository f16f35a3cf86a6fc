"""A view in a few lines of text, for terminals, `print(panel)` and readers who see no picture.

The first line counts; at most `LINES` more follow, and a last one says how many were left out.
"""

from __future__ import annotations

from collections import Counter

from rpcbench.telemetry.views import View
from rpcbench.words.events import Row, Table

LINES = 12


def text(view: View) -> str:
    """The view in words. ValueError for a dict that no function of `rpcbench.telemetry.views` made."""
    for section, write in (("rrefs", _rrefs), ("contexts", _contexts), ("steps", _steps)):
        if section in view:
            first, lines = write(view)
            more = [f"  … and {len(lines) - LINES} more"] if len(lines) > LINES else []
            return "\n".join([first + _left_out(view), *lines[:LINES], *more])
    raise ValueError(f"not a view of rpcbench: it has the sections {', '.join(view) or 'none'}")


def _rrefs(view: View) -> tuple[str, list[str]]:
    states = Counter(fork["state"] for fork in view["forks"].values())
    marks = "".join(f", {states[state]} {state}" for state in ("pending", "deleting") if states[state])
    first = f"{_workers(view)}, {_n(len(view['rrefs']), 'RRef')}, {_n(len(view['forks']), 'fork')}{marks}"
    holders: dict[str, list[str]] = {}
    for fork in view["forks"].values():
        note = "" if fork["state"] == "confirmed" else f" ({fork['state']})"
        holders.setdefault(fork["rref"], []).append(_name(view["workers"], fork["holder"]) + note)
    rrefs = sorted(view["rrefs"].items(), key=lambda item: _natural(item[0]))
    return first, [_rref_line(view["workers"], row, holders.get(key, [])) for key, row in rrefs]


def _rref_line(workers: Table, row: Row, holders: list[str]) -> str:
    kind = f" {row['type']}" if row["type"] else ""
    times = Counter(sorted(holders))
    users = ", ".join(who if count == 1 else f"{who} ({count} forks)" for who, count in times.items())
    used = f", used by {users}" if users else ""
    return f"  {row['rref']}{kind} on {_name(workers, row['owner'])}: {row['state']}{used}"


def _contexts(view: View) -> tuple[str, list[str]]:
    first = f"{_workers(view)}, {_n(len(view['contexts']), 'autograd context')}"
    left = Counter[str]()
    for one in view["passes"].values():
        left[one["context"]] += one["left"]
    return first, [_context_line(row, left[key]) for key, row in view["contexts"].items()]


def _context_line(row: Row, left: int) -> str:
    counts = f"{_n(row['sends'], 'send')}, {_n(row['recvs'], 'recv')}, {_n(row['gradients'], 'gradient')}"
    backward = f", backward runs ({left} gradients to come)" if row["passes"] else ""
    return f"  context {row['context']} on {_n(row['workers'], 'worker')}: {counts}{backward}"


def _steps(view: View) -> tuple[str, list[str]]:
    lines = [_step_line(row) for row in view["steps"].values()]
    return f"{_workers(view)}, {_n(len(lines), 'pipeline step')} at hand", lines[::-1]


def _step_line(row: Row) -> str:
    idle = "" if row["idle"] is None else f", idle {row['idle']:.1%}"
    span = (row["end"] - row["begin"]) * 1e3
    return f"  step {row['step']} ({row['state']}): {_n(row['ops'], 'op')} in {span:.1f} ms{idle}"


def _workers(view: View) -> str:
    return _n(len(view["workers"]), "member")


def _left_out(view: View) -> str:
    lost = sum(worker["left_out"] for worker in view["workers"].values())
    return f" ({_n(lost, 'event')} left out)" if lost else ""


def _name(workers: Table, worker: int) -> str:
    return str(workers[str(worker)]["name"])


def _natural(rref: str) -> list[int]:
    """0.9 before 0.10."""
    return [int(part) for part in rref.split(".")]


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
