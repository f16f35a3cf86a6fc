"""The views of messages and of collectives, joined from the reports of all members on one clock.

Sender and receiver report a message separately, each by its own clock. `gather` stores these halves as rows of a table
"messages" of the reporting member, the latest `KEPT`; `messages_view` joins them. Each member reports its own part of a
collective, and all parts have one key; `collectives_view` shows which members have entered, which are missing, which
came last, and how long the others waited for it.
"""
# Clocks: members on one host share one. For others a request measures the offset, as in NTP:
#     here   asked ─────────────────────────── told        ahead = ((heard - asked) + (said - told)) / 2
#                  \                         /             error = ((told - asked) - (said - heard)) / 2
#     member        heard ────────────── said
# Only the sum of both delays is known. If they were equal, `ahead` would be exact; half of their sum bounds the error.
# So of several estimates the one with the shortest round trip is the best.

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rpcbench.base.ids import COUNTER_BITS, OWN, Id, Row, Table
from rpcbench.protocol.delivery import incarnations_of, is_newer
from rpcbench.runtime.events import PARTS_KEPT, MessageRow
from rpcbench.runtime.members import GONE
from rpcbench.telemetry.message_counts import ANSWERS, CELL, parse_reports
from rpcbench.telemetry.views import View, World, remark_rows, rows_of, worker_rows


class ClockOffset(NamedTuple):
    """An estimate of a member's clock."""

    ahead: float  # seconds, relative to our clock
    error: float  # bound of the error in seconds


SHARED = ClockOffset(0.0, 0.0)


def clock_of(member: dict[str, Any]) -> ClockOffset:
    return ClockOffset(*member.get("clock", SHARED))


def estimate_clock(request_sent: float, request_received: float, said: float, reply_received: float) -> ClockOffset:
    """Return the offset from the times of one request: `request_sent` and `reply_received` by our clock, the others by
    its."""
    round_trip = max(0.0, (reply_received - request_sent) - (said - request_received))
    return ClockOffset(((request_received - request_sent) + (said - reply_received)) / 2, round_trip / 2)


def choose_better_clock(old: ClockOffset | None, new: ClockOffset) -> ClockOffset:
    """Return the estimate with the smaller error, the newer one if they are equal."""
    return new if old is None or new.error <= old.error else old


class Straggler(NamedTuple):
    """A member that came last."""

    worker: int
    seconds: float  # sum of the first members' waits for it
    collectives: int  # number of collectives


def collectives_view(world: World) -> View:
    """Return the collectives in the order of their beginning. Sections: workers, collectives, entries, clocks.

    The state of a collective is `done`, `open` or `failed`. `members`: names of all participants; `missing`: of those
    that have not reported their entry, as long as no member has completed it. Once all have entered, `last` is the id
    of the member that entered last, and `waited` the seconds that the first one waited for it; None before. `begin`:
    first entry; `end`: last exit, in seconds of our clock. `entries` (key `collective/worker`): entry and exit of each,
    and its wait for the last one, None as long as that is unknown.
    """
    found: dict[str, Table] = {}
    for worker, key, row in rows_of(world, "collectives"):
        found.setdefault(key, {})[str(worker)] = _on_our_clock(row, world[worker], ("begin", "end"))
    shown = {key: _collective_row(parts, world) for key, parts in found.items() if not _are_left_over(parts, world)}
    _place_missing(shown, found, world)
    order = sorted(shown, key=lambda key: float(shown[key]["begin"]))
    return {
        "workers": worker_rows(world, ()),
        "collectives": {key: shown[key] for key in order},
        "entries": {f"{key}/{id_}": row for key in order for id_, row in _entry_rows(key, shown[key], found[key])},
        "clocks": clock_errors(world),
    }


def _are_left_over(parts: Table, world: World) -> bool:
    """Return whether only former incarnations have parts of a collective: the other members have dropped theirs."""
    members = {world[int(worker)]["name"] for worker in parts}
    return any({*row["members"]} - members for row in parts.values()) and all(
        world[int(worker)]["incarnation"] > 0 and row["begin"] < world[int(worker)].get("since", 0.0)
        for worker, row in parts.items()
    )


def clock_errors(world: World) -> Table:
    """Return the bounds of the error of times from members on other hosts, in seconds."""
    errors = {str(member): clock_of(state).error for member, state in world.items()}
    return {member: {"error": error} for member, error in errors.items() if error}


def drop_earlier_collectives(member: dict[str, Any], began: float) -> dict[str, Any]:
    """Return a member without the collectives that it completed before `began`, in seconds of our clock."""
    rows: Table = member["tables"].get("collectives", {})
    then = began + clock_of(member).ahead
    kept = {key: row for key, row in rows.items() if row["end"] is None or row["end"] >= then}
    return {**member, "tables": {**member["tables"], "collectives": kept}} if len(kept) < len(rows) else member


def first_report(members: Iterable[dict[str, Any]]) -> float | None:
    """Return the time of the first message or collective of members, by our clock; None where there is none."""
    times = [
        time - clock_of(member).ahead
        for member in members
        for table, names in (("messages", ("sent", "received", "lost")), ("collectives", ("begin",)))
        for row in member["tables"].get(table, {}).values()
        for time in [row[name] for name in names if row[name] is not None]
    ]
    return min(times, default=None)


def find_stragglers(collectives: Iterable[Row]) -> list[Straggler]:
    """Return the members that came last in rows of the view, by seconds of waiting caused, most first."""
    sums: dict[int, tuple[float, int]] = {}
    for row in collectives:
        if row["last"] is not None:
            seconds, count = sums.get(row["last"], (0.0, 0))
            sums[row["last"]] = seconds + row["waited"], count + 1
    found = [Straggler(worker, *each) for worker, each in sums.items()]
    return sorted(found, key=lambda one: -one.seconds)


def _count_collectives(world: World, rows: Table) -> int:
    """Return how many collectives these groups have had, where a member has dropped some; else 0."""
    parts = (member["tables"].get("collectives", {}) for member in world.values())
    if not any(sum(row["end"] is not None for row in each.values()) >= PARTS_KEPT for each in parts):
        return 0
    latest: dict[str, int] = {}  # by scope, in which collectives are numbered from 1
    for scope, number in (one for member in world.values() for one in member.get("met", {}).items()):
        latest[scope] = max(latest.get(scope, 0), number)
    for key, row in rows.items():
        scope = key.rpartition(".")[0]
        latest[scope] = max(latest.get(scope, 0), row["number"])
    return sum(latest.values())


_MANY = 5  # collectives of which a sum says more than their rows


def _straggler_rows(world: World, rows: Table) -> Table:
    """Return a row with a sentence on the member that kept the others waiting for longest; none for few collectives."""
    known = sum(row["last"] is not None for row in rows.values())
    if known < _MANY:
        return {}
    first = find_stragglers(rows.values())[0]
    name, share = world[first.worker]["name"], round(100 * first.collectives / known)
    each, whole = (_format_seconds(seconds) for seconds in (first.seconds / first.collectives, first.seconds))
    words = f"{name} came last in {share} % of {known:,} collectives: the others waited {each} each time"
    words += f", {whole} in all"
    return {"collectives": {"words": words}}


def _format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _collective_row(parts: Table, world: World) -> Row:
    rows = list(parts.values())
    last = max(parts, key=lambda id_: float(parts[id_]["begin"]))
    begin, reporters = min(row["begin"] for row in rows), {world[int(id_)]["name"] for id_ in parts}
    missing = [name for name in rows[0]["members"] if name not in reporters]
    known = not missing and parts[last]["begin"] > begin  # none is the last if all come at once, or one is alone
    through = any(row["end"] is not None and not row["failed"] for row in rows)
    ends = [row["end"] for row in rows if row["end"] is not None]
    state = _collective_state(parts, world)
    return {
        **{name: rows[0][name] for name in ("group", "number", "op", "shape", "bytes")},
        "site": rows[0].get("site", ""),
        "elsewhere": [],
        "end_known": all(row.get("end_known", True) for row in rows),
        "members": list(rows[0]["members"]),
        "missing": [] if through else missing,  # no member completes it before all have entered
        "state": state,
        "begin": begin,
        "end": None if state == "open" else max(ends, default=None),
        "last": int(last) if known else None,
        "waited": parts[last]["begin"] - begin if known else None,
    }


def _place_missing(shown: Table, found: dict[str, Table], world: World) -> None:
    """Add to each open collective where its missing members are, and which members call another operation in it."""
    inside: dict[str, Row] = {}  # name of a member → the collective that it entered last, if it is still there
    for key in sorted(shown, key=lambda key: float(shown[key]["begin"])):
        for id_, part in found[key].items():
            if part["end"] is None:
                inside[world[int(id_)]["name"]] = {**shown[key], **part}
    for key, row in shown.items():
        if row["state"] == "open":
            row["elsewhere"] = [*_describe_differing(row, found[key], world), *_describe_places(row, inside)]


def _describe_differing(row: Row, parts: Table, world: World) -> Iterable[str]:
    """Yield a sentence for each member that calls another operation than the first one does."""
    for id_, part in parts.items():
        if part["op"] != row["op"]:
            yield f"{world[int(id_)]['name']} calls {part['op']} there{_site_suffix(part)}"


def _describe_places(row: Row, inside: dict[str, Row]) -> Iterable[str]:
    if idle := [name for name in row["missing"] if name not in inside]:
        yield f"{', '.join(idle)} {'are' if len(idle) > 1 else 'is'} in no collective"
    for name in row["missing"]:
        if (there := inside.get(name)) is not None:
            yield f"{name} is in {there['op']} #{there['number']} of {there['group']}{_site_suffix(there)}"


def _site_suffix(row: Row) -> str:
    return f" ({row['site']})" if row.get("site") else ""


def _collective_state(parts: Table, world: World) -> str:
    """Return the state; a running part of a lost member counts as failed."""
    there = {id_: row["end"] is None and world[int(id_)]["state"] not in GONE for id_, row in parts.items()}
    if any(there.values()):
        return "open"
    return "failed" if any(row["failed"] or row["end"] is None for row in parts.values()) else "done"


def _entry_rows(key: str, collective: Row, parts: Table) -> Iterable[tuple[str, Row]]:
    last_entry = None if collective["last"] is None else parts[str(collective["last"])]["begin"]
    for id_, row in parts.items():
        waited, end = None if last_entry is None else last_entry - row["begin"], row["end"]
        if end is not None and last_entry is not None and not row.get("end_known", True):
            end = max(end, last_entry)  # no member ends before all have come
        times = {"begin": row["begin"], "end": end, "waited": waited, "failed": row["failed"]}
        yield id_, {"collective": key, "worker": int(id_), **times}


KEPT = 10_000  # messages for each member, and in a view
_COUNTER = (1 << COUNTER_BITS) - 1
_UNHURRIED = frozenset(("UserDelete", "ReleaseContext", "ChildAccept", "ForkAccept", "Notice"))
"""Kinds that nothing waits for: whoever leaves in good order may leave before they arrive."""


def gather(rows: Table, member: int, reports: Iterable[Sequence[Any]]) -> int:
    """Add a member's reports of messages to its rows, drop the oldest beyond `KEPT`, and return how many these are."""
    for half, source, to in parse_reports(member, reports):
        key = f"{source}>{to}.{half.seq:x}"
        rows[key] = _add_half(rows.get(key), half, source, to)
    too_many = max(0, len(rows) - KEPT)
    for key in list(itertools.islice(rows, too_many)):
        del rows[key]
    return too_many


def _add_half(row: Row | None, half: MessageRow, source: int, to: int) -> Row:
    row = row or _new_message_row(half, source, to)
    if half.what == "sent":  # a retransmit is another try of the same message: the first time counts
        return {**row, "sent": half.time if row["sent"] is None else row["sent"], "tries": row["tries"] + 1}
    return {**row, half.what: half.time}


def _new_message_row(half: MessageRow, source: int, to: int) -> Row:
    caller = to if half.kind in ANSWERS else source  # the id of a call begins with the caller
    call = "" if half.call is None else _call_id(caller, half.call)
    about = {"kind": half.kind, "from": source, "to": to, "label": half.label, "call": call, "rrefs": half.rrefs}
    context = str(half.context) if half.context else ""
    return {**about, "context": context, "bytes": half.bytes, "tries": 0, "sent": None, "received": None, "lost": None}


def _call_id(caller: int, call: int) -> str:
    if call & OWN:  # made by this package: a cell, or hidden
        return f"{caller}{_OWN_CALL}{call & OWN - 1}"
    return str(Id(caller, call & _COUNTER, call >> COUNTER_BITS))


_OWN_CALL = ".cell"


def messages_view(world: World) -> View:
    """Return messages in the order of sending, and collectives.

    Sections: workers, messages, counts, zero, clocks, remarks (sentences); collectives and entries as in
    `collectives_view`; stragglers, with a sentence on the member that kept the others waiting for longest, once `_MANY`
    have a last one. The state of a message is `received`, `under way`, `lost` (reported so, or with its sender), or
    `untold`: its receiver is lost or has left, reports only since then, or has left some reports out.
    `sent` and `received`: seconds of our clock, None without a report of that end. `words` describe it, and `family` is
    a key of `MESSAGE_FAMILIES`; a reply has the label of its call. Of more than `KEPT` messages the latest are shown,
    and a row of `counts` has the number of `all`; so it is with collectives, of which members keep fewer. Calls of this
    package are shown only for cells. A row of `zero`, which only a live source has: when the first of all was reported,
    `at` by our clock, and `since_1970`.
    """
    joined: Table = {}
    for state in world.values():
        for key, half in state["tables"].get("messages", {}).items():
            other = joined.get(key)
            mine = _on_our_clock(half, state, ("sent", "received", "lost"))
            joined[key] = mine if other is None else _join_halves(other, mine)
    calls = [row for row in joined.values() if row["call"] and row["kind"] not in ANSWERS]
    labels = {row["call"]: row["label"] or _rref_label(row) for row in calls}
    cells = {row["call"] for row in calls if row["label"] == CELL}
    program = [key for key, row in joined.items() if _OWN_CALL not in row["call"] or row["call"] in cells]
    order = sorted(program, key=lambda key: _time_of_message(joined[key]))[-KEPT:]
    complete = {id_: _complete_since(member) for id_, member in world.items() if member.get("trimmed")}
    shown = {key: _shown_row(key, joined[key], labels, world, complete) for key in order}
    mentioned = {row[end] for row in shown.values() for end in ("from", "to")}
    cut = len(program) > KEPT or any(member.get("trimmed") for member in world.values())
    count = max(len(program), sum(member.get("counted", 0) for member in world.values())) if cut else 0
    together = collectives_view(world)
    met = _count_collectives(world, together["collectives"])
    zero = next((member["zero"] for member in world.values() if "zero" in member), None)
    return {
        **together,
        "workers": worker_rows(world, mentioned),
        "counts": ({"messages": {"all": count}} if count > len(shown) else {})
        | ({"collectives": {"all": met}} if met > len(together["collectives"]) else {}),
        "zero": {"first": {"at": zero[0], "since_1970": round(zero[1], 1)}} if zero else {},
        "stragglers": _straggler_rows(world, together["collectives"]),
        "messages": shown,
        "remarks": remark_rows(world),
    }


def _on_our_clock(row: Row, member: dict[str, Any], times: tuple[str, ...]) -> Row:
    ahead = clock_of(member).ahead
    return {**row, **{name: row[name] - ahead for name in times if row[name] is not None}} if ahead else row


def _join_halves(one: Row, other: Row) -> Row:
    """Join two halves of a message; the sender's fields count where both have them."""
    sender, receiver = (one, other) if one["sent"] is not None else (other, one)
    return {**sender, "received": receiver["received"] if sender["received"] is None else sender["received"]}


def _time_of_message(row: Row) -> float:
    times = (row["sent"], row["received"], row["lost"])  # `sent` may be None: the first report may be of the loss
    return float(next(time for time in times if time is not None))


def _shown_row(key: str, row: Row, labels: dict[str, str], world: World, complete: dict[int, float]) -> Row:
    label = row["label"] or labels.get(row["call"], "")
    words = describe_message(row["kind"], label or _rref_label(row))
    family = family_of(row["kind"], words)
    return {**row, "label": label, "words": words, "family": family, "state": _message_state(key, row, world, complete)}


def _rref_label(row: Row) -> str:
    return f"RRef {row['rrefs'][0]}" if row["rrefs"] else ""


def _complete_since(member: dict[str, Any]) -> float:
    """Return from when on no report of a member's messages was dropped: the oldest are, so since the first one kept."""
    rows: Table = member["tables"].get("messages", {})
    return _time_of_message(next(iter(rows.values()))) - clock_of(member).ahead if rows else math.inf


def _message_state(key: str, row: Row, world: World, complete: dict[int, float]) -> str:
    if row["received"] is not None:
        return "received"
    sender, receiver = [world.get(row[end], _LOST) for end in ("from", "to")]
    has_left = "left" in (sender["state"], receiver["state"])
    if row["lost"] is not None and not (has_left and row["kind"] in _UNHURRIED):
        return "lost"
    since = max(receiver.get("since", 0.0), complete.get(row["to"], 0.0))
    is_old = row["sent"] is not None and row["sent"] < since
    by, to = incarnations_of(int(key.partition(".")[2], 16))
    # It may have arrived: the receipt is among the reports that the receiver has left out, or that ended with it.
    if has_left or receiver["state"] == "lost" or receiver.get("missed") or is_old or _is_former(to, receiver):
        return "untold"
    return "lost" if sender["state"] == "lost" or _is_former(by, sender) else "under way"


_LOST: dict[str, Any] = {"state": "lost", "incarnation": 0}  # a member that is not known


def _is_former(incarnation: int, member: dict[str, Any]) -> bool:
    """Return whether this is an incarnation before the member's present one."""
    return is_newer(member["incarnation"], than=incarnation)


class MessageFamily(NamedTuple):
    """Kinds of messages that all panels and pictures draw alike."""

    key: str
    name: str
    colour: str
    kinds: tuple[str, ...]


MESSAGE_FAMILIES = (
    MessageFamily("call", "calls", "blue", ("Call", "Create", "Fetch")),
    MessageFamily("answer", "results", "green", ("Result",)),
    MessageFamily(
        "failure", "errors, cancelled calls", "red",
        ("Failure", "Cancel", "BackwardFailed", "CancelDelivery", "DeliveryReport"),
    ),
    MessageFamily(
        "rref", "RRefs", "orange", ("ForkRequest", "ForkAccept", "ChildAccept", "UserDelete", "CreateFailed"),
    ),
    MessageFamily(
        "autograd", "autograd", "purple",
        ("Discover", "Discovered", "Gradients", "Settled", "ReleaseContext", "ContextParticipant"),
    ),
    MessageFamily("pipeline", "values between stages", "olive", ("Parcel",)),
    MessageFamily("gradient", "gradients between stages", "purple", ()),  # parcels, too: see `family_of`
    MessageFamily("collective", "collectives", "amber", ("Collective",)),
    MessageFamily("notice", "notices", "dim", ("Notice",)),
)  # fmt: skip
MESSAGE_STATES = {"under way": "in flight", "lost": "lost", "untold": "no report"}
"""The states of messages that have not arrived, in words."""
FAMILY_COLOURS = {family.key: family.colour for family in MESSAGE_FAMILIES}
_FAMILIES = {kind: family.key for family in MESSAGE_FAMILIES for kind in family.kinds}


def family_of(kind: str, words: str) -> str:
    """Return the key of the family of a message with these words; `other` for an unknown kind."""
    return "gradient" if kind == "Parcel" and words.startswith("gradient") else _FAMILIES.get(kind, "other")


_WORDS = {  # the words of each kind; {}: the function, or the RRef
    "Call": "call {}", "Create": "remote {}", "Fetch": "fetch {}", "Result": "result of {}", "Failure": "error of {}",
    "Cancel": "cancel {}", "ForkRequest": "new user of {}", "ForkAccept": "confirmed user of {}",
    "ChildAccept": "confirmed new user", "UserDelete": "release {}", "CreateFailed": "failed {}",
    "Discover": "backward: find sends", "Discovered": "backward: found sends", "Gradients": "gradients",
    "Settled": "gradients passed on", "BackwardFailed": "backward failed", "ReleaseContext": "release context",
    "ContextParticipant": "part of context", "CancelDelivery": "cancel delivery", "DeliveryReport": "delivery report",
}  # fmt: skip
_PARCELS = {  # values between stages; see `pipeline.exchange`
    "F": "activations of micro-batch {}", "B": "gradient of micro-batch {}", "T": "gradient of tied weight {}",
    "A": "ready", "G": "address of the group", "R": "ready to commit", "O": "commit or abort",
}  # fmt: skip
_NOTICES = {
    "cell": "output of a cell", "shown": "output is shown", "answer": "answer to input()", "heard": "interrupt handled",
    "interrupt": "interrupt the cell", "queued": "cell is queued", "comm": "message of a widget",
    "pipeline ends": "step is aborted", "pipeline credits": "room for values",
}  # fmt: skip
_PIPELINE_CALLS = {
    "pipeline run_step": "pipeline step", "pipeline step_optimizers": "commit of a step",
    "pipeline abort_step": "stop of a step", "pipeline set_optimizers": "optimizers",
}  # fmt: skip
_PARCEL = re.compile(r"([A-Z])(\d*) for (.+)")


@lru_cache(maxsize=4096)
def describe_message(kind: str, about: str) -> str:
    """Describe a message: `call train`, or `gradient of micro-batch 2 → stage 0`. `about`: its label, or its RRef."""
    if kind == "Notice":
        return _NOTICES.get(about, about)
    if kind == "Parcel":
        parts = _PARCEL.fullmatch(about)
        return f"{_PARCELS.get(parts[1], parts[1]).format(parts[2])} → {parts[3]}" if parts else about
    if about == CELL and kind == "Call":
        return "run this cell"
    about, words = _PIPELINE_CALLS.get(about, about), _WORDS.get(kind, kind)
    return words.format(about) if about else words.removesuffix(" {}").removesuffix(" of")
