"""The state of a cluster, or of a job elsewhere, in one document and as text: what `rpcbench state` prints.

Guarantees
- The document is made from the views that panels draw, and the reports of `%cluster stack` and `rpcbench.explain`. The
  text is made from the document.
- Its members are rows of the workers panel, its collectives rows of the messages panel. `STATE_SHAPES` has all fields;
  docs/api/panel-json.md is made from it. `STATE_VERSION` changes as `panel_json.VERSION` does.
- Workers are asked and not disturbed: one that does not answer within a second is in it, with what its host shows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row, Table
from rpcbench.cells.cell_log import ERROR
from rpcbench.distributed.flight_dumps import name_of_rank
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.stacks import stack_texts
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.runtime.jobs import FAILED
from rpcbench.telemetry.attached_job import AttachedJob, describe_stack, find_place
from rpcbench.telemetry.collector import HealthPoller
from rpcbench.telemetry.log_view import ERROR as ERROR_LINE
from rpcbench.telemetry.log_view import MORE_ERROR, LevelFinder
from rpcbench.telemetry.message_views import collectives_view
from rpcbench.telemetry.panel_json import COLLECTIVE, WORKER, check_sections
from rpcbench.telemetry.progress_view import job_words, progress_view
from rpcbench.telemetry.record_schema import check_type, make_type
from rpcbench.telemetry.summary import worker_line
from rpcbench.telemetry.trace import CollectiveTimeline, collective_name
from rpcbench.telemetry.views import View, World, remark_rows, workers_view

STATE_FORMAT, STATE_VERSION = "rpcbench state", 1
READ_SECONDS = 1.0  # for members to answer
_LAST = 20  # ended collectives, and errors of each kind
_OF_JOBS = ("id", "name", "state", "now", "host")  # fields of all members; a job has no others

STATE_SHAPES: dict[str, dict[str, Any]] = {
    "members": {f"{name}{'' if name in _OF_JOBS else '?'}": shape for name, shape in WORKER.items()},
    "waits": {
        "member": str, "thread": str, "call": str, "caller": str, "state": str, "seconds": (None, float),
        "needs": [{"call": str, "on": str}], "places": [str],
    },
    "stacks": {"text": str},
    "collectives": COLLECTIVE,
    "errors": {"kind": str, "where": str, "words": str, "at": (None, float)},
    "remarks": {"words": str},
}  # fmt: skip

_HEAD = make_type({
    "format": str, "version": int, "at": float, "epoch": float, "sections": dict,
    "cluster": {
        "name": str, "label": str, "process": (None, int), "program": str, "kind": str, "workers": [str],
    },
})  # fmt: skip
_ROWS = {name: make_type(shape) for name, shape in STATE_SHAPES.items()}


def check_state(document: dict[str, Any]) -> None:
    """Raise ValueError, with the first place that differs, if this is no document of this version."""
    check_type(document, _HEAD, "the document")
    if (document["format"], document["version"]) != (STATE_FORMAT, STATE_VERSION):
        raise ValueError(f"the document is {document['format']!r} of version {document['version']}")
    check_sections(document["sections"], _ROWS)


def answer_question(agent: Agent, question: str) -> Any:
    """Return the answer to a question at the state socket: `name`, `json` or `text`. ValueError for others."""
    match question:
        case "name":
            return describe_process(agent)
        case "json":
            return read_state(agent)
        case "text":
            return state_text(read_state(agent))
    raise ValueError(f"it knows no question {question[:40]!r}: another version of rpcbench runs there")


def describe_process(agent: Agent) -> Row:
    """Return which world it is: `name` of its run directory, `label` that the notebook gave it, `process`, `program`,
    `kind` of workers, and their names."""
    cluster = agent.owner if isinstance(agent.owner, BaseCluster) else None
    return {
        "name": cluster.directory.name if cluster else agent.name, "label": cluster.label if cluster else "",
        "process": os.getpid(), "program": _describe_program(),
        "kind": cluster.kind if cluster else "", "workers": cluster.workers if cluster else [],
    }  # fmt: skip


def _describe_program() -> str:
    """Return the notebook, or the script, that runs in this process."""
    notebook = os.environ.get("JPY_SESSION_NAME", "")  # set by Jupyter's server
    script = Path(sys.argv[0] or "python").name
    return notebook or ("a Jupyter kernel" if script == "ipykernel_launcher.py" else script)


def read_state(agent: Agent) -> dict[str, Any]:
    """Read the state of a world: its `sections` are `members`, `waits`, `stacks`, `collectives`, `errors`, `remarks`.

    `waits`: each thread of the user's program, and each call that is served: its `state` is `runs`, `waits`, `asks`
    (for a value that is not made yet), `queued` or `held`; it `needs` the calls listed, with the member that each is
    `on`. `stacks`: a report for each member. `collectives`: those under way, and the last ones that have ended.
    `errors`: of cells, jobs, workers and actions, and error lines of workers' output; `at`: seconds since 1970 or null.
    `remarks`: sentences, such as one on calls that wait for each other in a circle.
    """
    world = _read_world(agent)
    view = workers_view(world)
    watchdog = agent.part(Watchdog)
    waits, circle = watchdog.read_waits()
    sections = {
        "members": view["workers"],
        "waits": _number_rows(waits),
        "stacks": _read_stacks(agent),
        "collectives": _latest_collectives(collectives_view(world)["collectives"]),
        "errors": _number_rows([*_error_rows(view, progress_view(world))]),
        "remarks": {**remark_rows(world), **({"circle": {"words": circle}} if circle else {})},
    }
    now = time.time()
    return _make_document(describe_process(agent), now - time.monotonic(), now, sections)


def _make_document(about: Row, epoch: float, now: float, sections: View) -> dict[str, Any]:
    head = {"format": STATE_FORMAT, "version": STATE_VERSION, "cluster": about, "at": now, "epoch": epoch}
    return {**head, "sections": sections}


def _number_rows(rows: Iterable[Row]) -> Table:
    return {str(number): row for number, row in enumerate(rows)}


def _read_world(agent: Agent) -> World:
    poller = agent.part(HealthPoller)
    stop = poller.subscribe(lambda: None)  # for the time: without a subscriber nothing is collected
    try:
        poller.settle(READ_SECONDS)
        return poller.world()
    finally:
        stop()


def _read_stacks(agent: Agent) -> Table:
    watched = agent.owner.watched() if isinstance(agent.owner, BaseCluster) else []
    names = [info.name for info in agent.members()]
    return {name: {"text": text} for name, text in stack_texts(agent, names, watched).items()}


def _latest_collectives(rows: Table) -> Table:
    ended = [key for key, row in rows.items() if row["state"] != "open"]
    dropped = {*ended[:-_LAST]}
    return {key: row for key, row in rows.items() if key not in dropped}


# -- errors
def _error_rows(view: View, progress: View) -> Iterator[Row]:
    cells = [row for row in progress["cells"].values() if row["state"] == ERROR]
    for row in sorted(cells, key=lambda row: int(row["order"]))[-_LAST:]:
        ended = None if None in (row["began"], row["lasted"]) else row["began"] + row["lasted"]
        yield _error_row("cell", row["where"], f"{row['how']}, in the cell: {row['line']}", ended)
    for row in [row for row in progress["jobs"].values() if row["state"] == FAILED][-_LAST:]:
        yield _error_row("job", row["name"], job_words(row), row["end"])
    for row in view["workers"].values():
        if row["state"] == "lost":
            yield _error_row("worker", row["name"], row["now"])
    for row in view["actions"].values():
        if row["state"] == "failed":
            yield _error_row("action", f"{row['action']} {row['target']}", row["error"])
    for key, row in view["logs"].items():
        yield from _output_errors(view["workers"][key]["name"], row["text"].splitlines())


def _error_row(kind: str, where: str, words: str, at: float | None = None) -> Row:
    return {"kind": kind, "where": where, "words": words, "at": at}


def _output_errors(name: str, lines: list[str]) -> Iterator[Row]:
    """Yield the errors in the last lines of a worker's output outside cells, each with its traceback."""
    found: list[str] = []
    for line, level in zip(lines, LevelFinder().find_levels(lines), strict=True):
        if level == ERROR_LINE and found:
            yield _error_row("output", name, "\n".join(found))
            found = []
        if level in (ERROR_LINE, MORE_ERROR):
            found.append(line)
    if found:
        yield _error_row("output", name, "\n".join(found))


# -- jobs elsewhere
def read_job_state(job: AttachedJob) -> dict[str, Any]:
    """Read the state of a job by torch's debug server, as `read_state` does; its ranks are the members.

    Of a rank there are only `id`, `name`, `host`, `state` (`up`, or `silent` where it does not answer), and `now`, the
    line that its main thread runs. `waits` is empty.
    """
    answers = job.read_stacks()
    errors = [_error_row("rank", name_of_rank(each.rank), each.error) for each in answers if each.error]
    remarks: Table = {}
    collectives: Table = {}
    try:
        world = job.read_world()
        collectives = _latest_collectives(collectives_view(world)["collectives"])
        remarks = remark_rows(world)
    except ConnectionError as error:  # a job may have no flight recorder; its stacks tell something, too
        remarks = {"recorder": {"words": str(error)}}
    sections = {
        "members": {str(each.rank): _rank_row(each) for each in answers},
        "waits": {},
        "stacks": {name_of_rank(each.rank): {"text": describe_stack(each)} for each in answers},
        "collectives": collectives, "errors": _number_rows(errors), "remarks": remarks,
    }  # fmt: skip
    about = {"name": job.address, "label": "", "process": None, "program": "", "kind": "job", "workers": job.ranks}
    return _make_document(about, 0.0, time.time(), sections)


def _rank_row(answer: Any) -> Row:
    now = "no answer" if answer.error else find_place(answer.text)
    state = "silent" if answer.error else "up"
    return {"id": answer.rank, "name": name_of_rank(answer.rank), "host": answer.host, "state": state, "now": now}


# -- text
def state_text(document: Mapping[str, Any]) -> str:
    """Return the document as text, for a terminal."""
    sections = document["sections"]
    parts = {
        "": [_head_line(document)],
        "Members": [_member_line(row) for row in sections["members"].values()],
        "Collectives": [*_collective_lines(document)],
        "Stacks": [f"  {line}" for row in sections["stacks"].values() for line in row["text"].splitlines()],
        "Errors": [line for row in sections["errors"].values() for line in _error_lines(row)],
        "Remarks": [f"  {row['words']}" for row in sections["remarks"].values()],
    }
    return "\n".join(line for head, lines in parts.items() if lines for line in ([head] if head else []) + lines)


def _head_line(document: Mapping[str, Any]) -> str:
    about = document["cluster"]
    at = time.strftime("%H:%M:%S", time.localtime(document["at"]))
    if about["process"] is None:
        return f"A job of {count_noun(len(about['workers']), 'rank')} at {about['name']}, at {at}"
    label = f" ({about['label']})" if about["label"] else ""
    workers = count_noun(len(about["workers"]), "worker")
    return f"{about['name']}{label}: {workers} of {about['program']}, process {about['process']}, at {at}"


def _member_line(row: Row) -> str:
    return worker_line(row) if "pid" in row else f"  {row['name']} on {row['host']}: {row['now']}"


def _collective_lines(document: Mapping[str, Any]) -> Iterator[str]:
    sections = document["sections"]
    timeline = CollectiveTimeline({"collectives": sections["collectives"], "entries": {}, "workers": {}})
    yield from (f"  {line}" for line in timeline.describe_unfinished())
    ended = [row for row in sections["collectives"].values() if row["state"] != "open"]
    if ended:
        last = ended[-1]
        ago = "" if last["end"] is None else f", {document['at'] - document['epoch'] - last['end']:.1f} s ago"
        yield f"  the last that ended: {collective_name(last)}, {last['state']}{ago}"


def _error_lines(row: Row) -> Iterator[str]:
    first, *others = row["words"].splitlines() or [""]
    yield f"  {row['kind']} {row['where']}: {first}"
    yield from (f"      {line}" for line in others)
