"""Text summaries of views: a line with counts, some more, by default `LINES`, and the number of those left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row, Table
from rpcbench.telemetry.compare_view import compare_text
from rpcbench.telemetry.log_view import logs_text
from rpcbench.telemetry.message_views import MESSAGE_STATES
from rpcbench.telemetry.metric_views import metrics_text
from rpcbench.telemetry.plan_view import plan_text
from rpcbench.telemetry.progress_view import progress_text
from rpcbench.telemetry.resource_views import resources_text, traffic_text
from rpcbench.telemetry.shard_views import shards_text
from rpcbench.telemetry.views import RREF_STATES, View
from rpcbench.telemetry.worker_columns import figure_words

LINES = 12  # so that a cell's output fits a screen


def summarize_view(view: View, most: int | None = LINES) -> str:
    """Return a view as text, with `most` lines after the first; None: all. ValueError for a dict that is no view."""
    # One section that only this view has identifies it.
    kinds: dict[str, Callable[[View], tuple[str, list[str]]]] = {
        "rrefs": _summarize_rrefs, "contexts": _summarize_contexts, "steps": _summarize_steps,
        "messages": _summarize_messages, "logs": _how_they_are,
        "held": _summarize_held, "pieces": shards_text, "comparisons": compare_text,
        "plans": plan_text, "jobs": progress_text, "curves": metrics_text, "samples": resources_text,
        "flows": traffic_text, "files": partial(logs_text, most=most),
    }  # fmt: skip
    for section, write in kinds.items():
        if section in view:
            first, lines = write(view)
            more = [] if most is None or len(lines) <= most else [f"  … and {len(lines) - most} more"]
            return "\n".join([first + _left_out(view), *lines[:most], *more])
    raise ValueError(f"not a view of rpcbench: it has the sections {', '.join(view) or 'none'}")


def _summarize_rrefs(view: View) -> tuple[str, list[str]]:
    states = Counter(fork["state"] for fork in view["forks"].values())
    marks = "".join(f", {states[state]} {state}" for state in ("pending", "deleting") if states[state])
    rrefs, forks = count_noun(len(view["rrefs"]), "RRef"), count_noun(len(view["forks"]), "fork")
    first = f"{_count_workers(view)}, {rrefs}, {forks}{marks}"
    holders: dict[str, list[str]] = {}
    for fork in view["forks"].values():
        note = "" if fork["state"] == "confirmed" else f" ({fork['state']})"
        holders.setdefault(fork["rref"], []).append(_worker_name(view["workers"], fork["holder"]) + note)
    keys = sorted(view["rrefs"], key=_rref_sort_key)
    return first, [_rref_line(view["workers"], view["rrefs"][key], holders.get(key, [])) for key in keys]


def _rref_line(workers: Table, row: Row, holders: list[str]) -> str:
    kind = f" {row['type']}" if row["type"] else ""
    times = Counter(sorted(holders))
    users = ", ".join(who if count == 1 else f"{who} ({count} forks)" for who, count in times.items())
    used = f", used by {users}" if users else ""
    return f"  {row['rref']}{kind} on {_worker_name(workers, row['owner'])}: {RREF_STATES[row['state']]}{used}"


def _summarize_contexts(view: View) -> tuple[str, list[str]]:
    first = f"{_count_workers(view)}, {count_noun(len(view['contexts']), 'autograd context')}"
    left = Counter[str]()
    for one in view["passes"].values():
        left[one["context"]] += one["left"]
    return first, [_context_line(row, left[key]) for key, row in view["contexts"].items()]


def _context_line(row: Row, left: int) -> str:
    counts = ", ".join(count_noun(row[f"{noun}s"], noun) for noun in ("send", "recv", "gradient"))
    backward = f", backward runs ({left} gradients to come)" if row["passes"] else ""
    state = "" if row["ended"] is None else ", released"
    name = f"context {row['context']}" if row["step"] is None else f"step {row['step']} (context {row['context']})"
    return f"  {name} on {count_noun(row['workers'], 'member')}: {counts}{backward}{state}"


def _summarize_steps(view: View) -> tuple[str, list[str]]:
    lines = [f"  {_step_line(row)}" for row in view["steps"].values()]
    first = f"{_count_workers(view)}, {count_noun(len(lines), 'pipeline step')} listed"
    return first, _remark_lines(view) + lines[::-1]  # latest first


def _remark_lines(view: View) -> list[str]:
    return [f"  {row['words']}" for row in view["remarks"].values()]


def _step_line(row: Row) -> str:
    """Return a pipeline step as text: `step 3 (complete): 32 ops in 9.1 ms, bubble 25.0% (minimum 11.1%), loss 0.5`."""
    minimum = "" if row["minimum"] is None else f" (minimum {row['minimum']:.1%})"
    bubble = "" if row["bubble"] is None else f", bubble {row['bubble']:.1%}{minimum}"
    loss = "" if row["loss"] is None else f", loss {row['loss']:.4g}"
    span = (row["end"] - row["begin"]) * 1e3
    return f"step {row['step']} ({row['state']}): {count_noun(row['ops'], 'op')} in {span:.1f} ms{bubble}{loss}"


def _summarize_messages(view: View) -> tuple[str, list[str]]:
    every, together = view["messages"].values(), view["collectives"].values()
    rows = [row for row in every if row["kind"] != "Notice"]  # output of cells and the like is counted, not listed
    states = Counter(row["state"] for row in rows)
    marks = "".join(f", {states[state]} {word}" for state, word in MESSAGE_STATES.items() if states[state])
    # Times are relative to the first row: the workers' monotonic clocks have an arbitrary origin.
    began = min([*(_row_time(row) for row in rows), *(row["begin"] for row in together)], default=0.0)
    lines = [(_row_time(row), _message_line(view["workers"], row, began)) for row in rows]
    lines += [(row["begin"], _collective_line(view["workers"], row, began)) for row in together]
    met = view["counts"].get("collectives")
    count = count_noun(len(together), "collective")
    if met:
        count = f"last {len(together):,} of {met['all']:,} collectives of these groups"
    done = f", {count}" if together else ""
    notices = f", {count_noun(len(every) - len(rows), 'notice')}" if len(every) > len(rows) else ""
    sent = view["counts"].get("messages")
    cut = f", last {len(every):,} of {sent['all']:,} shown" if sent else ""
    late = [f"  {row['words']}" for row in view["stragglers"].values()]
    first = f"{_count_workers(view)}, {count_noun(len(rows), 'message')}{marks}{done}{notices}{cut}"
    return first, _remark_lines(view) + late + [line for _, line in sorted(lines, key=lambda line: line[0])]


def _collective_line(workers: Table, row: Row, began: float) -> str:
    at = f"  {(row['begin'] - began) * 1e3:8.1f} ms  {', '.join(row['members'])}:"
    return f"{at} {_collective_text(workers, row)}"


def _collective_text(workers: Table, row: Row) -> str:
    """Return a collective as text: `all_reduce(SUM) of float32[4] in world #3, 1.2 ms, worker2 last, by 0.9 ms`."""
    shape = f" of {row['shape']}" if row["shape"] else ""
    duration = "" if row["end"] is None else f", {(row['end'] - row['begin']) * 1e3:.1f} ms"
    state = "" if row["state"] == "done" else f", {row['state']}"
    last_id = row["last"]
    last = "" if last_id is None else f", {_worker_name(workers, last_id)} last, by {row['waited'] * 1e3:.1f} ms"
    missing = f", without {', '.join(row['missing'])}" if row["missing"] else ""
    return f"{row['op']}{shape} in {row['group']} #{row['number']}{duration}{state}{last}{missing}"


def _message_line(workers: Table, row: Row, began: float) -> str:
    ends = f"{_worker_name(workers, row['from'])} → {_worker_name(workers, row['to'])}"
    state = "" if row["state"] == "received" else f" ({MESSAGE_STATES[row['state']]})"
    return f"  {(_row_time(row) - began) * 1e3:8.1f} ms  {ends}: {row['words']}{state}"


def _row_time(row: Row) -> float:
    """Return when a message was sent, or received or lost if its sending was not reported."""
    return float(next(row[name] for name in ("sent", "received", "lost") if row.get(name) is not None))


def _how_they_are(view: View) -> tuple[str, list[str]]:
    rows = view["workers"].values()
    failed = [f"  {key} failed: {row['error']}" for key, row in view["actions"].items() if row["state"] == "failed"]
    up = sum(row["state"] == "up" for row in rows)
    return f"{_count_workers(view)}, {up} ready", [worker_line(row) for row in rows] + failed


def worker_line(row: Row) -> str:
    """Return a row of the workers panel as a line of text."""
    start = f" (start {row['incarnation'] + 1})" if row["incarnation"] else ""  # of a restarted worker
    return f"  {row['name']}{start}: {', '.join(filter(None, [row['now'], figure_words(row)]))}"


def _summarize_held(view: View) -> tuple[str, list[str]]:
    state, rows = view["stepper"]["0"], [view["held"][str(n)] for n in view["stepper"]["0"]["order"]]
    first = f"{count_noun(len(rows), 'message')} held" if state["on"] else "no message is held any more"
    lines = [f"  {row['n']:>3}  {row['sender']} → {row['to']}  {row['words']}" for row in rows]
    return f"{first}; {state['delivered']} delivered, {state['dropped']} dropped", lines


def _count_workers(view: View) -> str:
    return count_noun(len(view["workers"]), "member")


def _left_out(view: View) -> str:
    lost = sum(worker["left_out"] for worker in view.get("workers", {}).values())
    return f" ({count_noun(lost, 'event')} left out)" if lost else ""


def _worker_name(workers: Table, worker: int) -> str:
    return str(workers[str(worker)]["name"])


def _rref_sort_key(rref: str) -> list[int]:
    """Return a sort key by which 0.9 precedes 0.10."""
    return [int(part) for part in rref.split(".")]
