"""Views are pure functions of tables: each fact of the tables appears once, and deltas carry views forward."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.telemetry.autograd_view import autograd_view
from rpcbench.telemetry.summary import LINES, summarize_view
from rpcbench.telemetry.views import diff_views, patch_view, pipeline_view, rref_view

VIEWS = [rref_view, autograd_view, pipeline_view]


def world(*tables, states=("up",) * 8):
    return {
        i: {"name": f"w{i}", "id": i, "incarnation": 0, "state": states[i], "tables": table, "left_out": 0}
        for i, table in enumerate(tables)
    }


def owned(*forks, ready=True, failed=False, kind="Tensor"):
    return {
        "rref": "0.1", "ready": ready, "failed": failed, "type": kind, "forks": list(forks), "made": 1.0, "size": 40,
        "cell": "c", "number": 3,
    }  # fmt: skip


def user(fork, owner, state="confirmed", parent=None, children=(), rref="0.1"):
    return {
        "rref": rref, "fork": fork, "owner": owner, "parent": parent, "state": state, "children": list(children),
        "type": "Tensor",
    }  # fmt: skip


def op(worker, kind, batch, begin, end, step=1):
    return {
        "step": step, "worker": worker, "stage": worker - 1, "op": kind, "microbatch": batch,
        "begin": begin, "end": end, "bytes": 0, "held": 0, "failed": False,
    }  # fmt: skip


# ---- rrefs


def test_a_fork_has_the_state_its_holder_gives_it():
    at = world(
        {"users": {"0.2": user("0.2", 1, "deleting")}},
        {"owned": {"0.1": owned({"fork": "0.2", "holder": 0}, {"fork": "0.3", "holder": 2})}},
        {},
    )
    view = rref_view(at)
    assert view["forks"]["0.2"] == {
        "fork": "0.2", "rref": "0.1", "owner": 1, "holder": 0, "parent": None, "state": "deleting",
    }  # fmt: skip
    assert view["forks"]["0.3"]["state"] == "listed"
    assert view["rrefs"]["0.1"] == {
        "rref": "0.1", "owner": 1, "type": "Tensor", "colour": "blue", "state": "ready", "forks": 2, "size": 40,
        "made": None, "cell": "c", "number": 3, "by": 0,
    }  # fmt: skip


def test_an_rref_is_as_old_as_its_owners_clock_says():
    at = world({}, {"owned": {"0.1": owned(), "0.3": {**owned(), "made": 0.0}}})
    at[1]["epoch"] = 1000.26
    assert {key: row["made"] for key, row in rref_view(at)["rrefs"].items()} == {"0.1": 1001.3, "0.3": None}


def test_a_fork_on_its_way_is_pending_at_the_worker_it_goes_to():
    sent = {"fork": "0.9", "to": 2}
    at = world({"users": {"0.2": user("0.2", 1, children=[sent])}}, {"owned": {"0.1": owned()}}, {})
    assert rref_view(at)["forks"]["0.9"] == {
        "fork": "0.9", "rref": "0.1", "owner": 1, "holder": 2, "parent": 0, "state": "pending",
    }  # fmt: skip
    at[2]["tables"] = {"users": {"0.9": user("0.9", 1, "confirmed", parent=0)}}
    assert rref_view(at)["forks"]["0.9"]["state"] == "confirmed"


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (owned(), "ready"),
        (owned(ready=False), "computing"),
        (owned(ready=True, failed=True), "failed"),
        (owned(ready=False, failed=True), "failed"),
    ],
)
def test_the_state_of_an_rref_comes_from_its_owner(row, state):
    assert rref_view(world({"owned": {"0.1": row}}))["rrefs"]["0.1"]["state"] == state


@pytest.mark.parametrize(("owner", "state"), [("up", "unlisted"), ("lost", "lost"), ("left", "lost")])
def test_an_rref_its_owner_does_not_list_is_shown_by_its_users(owner, state):
    at = world({"users": {"0.2": user("0.2", 1, "pending")}}, {}, states=("up", owner))
    row = rref_view(at)["rrefs"]["0.1"]
    assert (row["owner"], row["type"], row["state"], row["forks"]) == (1, "Tensor", state, 1)
    assert [row[name] for name in ("size", "made", "cell", "number", "by")] == [None, None, "", None, 0]


def test_what_a_lost_worker_had_said_no_longer_counts():
    held = {"fork": "0.2", "holder": 2}
    at = world(
        {},
        {"owned": {"0.1": owned(held)}, "contexts": {"5": context(sends=[{"message": 1, "to": 2}])}},
        {"users": {"0.2": user("0.2", 1)}, "contexts": {"5": context(recvs=[{"message": 1, "from": 1}])}},
        states=("up", "lost", "up"),
    )
    assert rref_view(at)["rrefs"]["0.1"]["state"] == "lost"
    assert set(rref_view(at)["forks"]) == {"0.2"}
    assert set(autograd_view(at)["members"]) == {"5/2"}
    at[2]["state"] = "left"
    assert rref_view(at)["rrefs"] == rref_view(at)["forks"] == autograd_view(at)["contexts"] == {}


def test_workers_that_are_only_mentioned_are_listed_as_unknown():
    view = rref_view(world({"users": {"0.2": user("0.2", 7, parent=5)}}))
    assert {key: row["state"] for key, row in view["workers"].items()} == {"0": "up", "7": "unknown", "5": "unknown"}


# ---- autograd


def context(sends=(), recvs=(), passes=(), gradients=0):
    return {
        "context": 5, "known": [], "sends": list(sends), "recvs": list(recvs), "passes": list(passes),
        "gradients": gradients,
    }  # fmt: skip


def test_sends_and_recvs_are_paired_by_message():
    sends = [{"message": 1, "to": 1}, {"message": 2, "to": 1}]
    at = world(
        {"contexts": {"5": context(sends=sends)}},
        {"contexts": {"5": context(recvs=[{"message": 1, "from": 0}], gradients=3)}},
    )
    view = autograd_view(at)
    link = {"context": "5", "from": 0, "to": 1, "state": "open", "sent": 2, "received": 1, "open": 1}
    assert view["links"] == {"5/0>1": link}
    assert view["members"]["5/0"] == {"context": "5", "worker": 0, "sends": 2, "recvs": 0, "gradients": 0}
    totals = {"workers": 2, "sends": 2, "recvs": 1, "open": 1, "gradients": 3, "passes": 0}
    assert view["contexts"]["5"] == {"context": "5", "made": None, "ended": None, "step": None, **totals}


def test_equal_counts_of_different_messages_are_no_pair():
    at = world(
        {"contexts": {"5": context(sends=[{"message": 1, "to": 1}])}},
        {"contexts": {"5": context(recvs=[{"message": 2, "from": 0}])}},
    )
    link = autograd_view(at)["links"]["5/0>1"]
    assert (link["state"], link["sent"], link["received"]) == ("open", 2, 1)  # what was received was sent
    assert autograd_view(at)["contexts"]["5"]["open"] == 1


def test_a_sender_that_has_forgotten_an_old_context_has_lost_nothing():
    recvs = [{"message": 1, "from": 0}, {"message": 2, "from": 0}]
    view = autograd_view(world({}, {"contexts": {"5": context(recvs=recvs)}}))
    link = view["links"]["5/0>1"]
    assert (link["state"], link["sent"], link["received"]) == ("paired", 2, 2)


def test_a_half_whose_worker_is_gone_is_not_under_way():
    at = world({"contexts": {"5": context(sends=[{"message": 1, "to": 1}])}}, {}, states=("up", "lost"))
    assert autograd_view(at)["links"]["5/0>1"]["state"] == "lost"
    assert autograd_view(at)["contexts"]["5"]["open"] == 0


def test_a_pass_says_what_is_left():
    one = {"pass": "0.1", "state": "running", "needed": 8, "arrived": 3, "waiting": 2}
    at = world({"contexts": {"5": context(passes=[one])}})
    expected = {"context": "5", "worker": 0, "left": 5, "regions": None, "ran": None, **one}
    assert autograd_view(at)["passes"] == {"5/0.1/0": expected}
    assert autograd_view(at)["contexts"]["5"]["passes"] == 1
    cut = [{"pass": "0.2", "regions": 9, "ran": 9}, {"pass": "0.1", "regions": 3, "ran": 1}]
    at[0]["tables"]["graphs"] = {"5": {"context": 5, "leaves": [], "more": 0, "passes": cut}}
    assert autograd_view(at)["passes"] == {"5/0.1/0": {**expected, "regions": 3, "ran": 1}}


def test_a_leaf_is_listed_with_the_worker_that_holds_its_gradient():
    leaves = [{"name": "w", "shape": "[3, 4]", "bytes": 48}, {"name": "", "shape": "[]", "bytes": 4}]
    graph = {"context": 5, "leaves": leaves, "more": 1, "passes": []}
    at = world({"contexts": {"5": context()}}, {"contexts": {"5": context(gradients=3)}, "graphs": {"5": graph}})
    at[0]["tables"]["graphs"] = {"6": graph}  # its context is over, or not yet told of
    assert autograd_view(at)["leaves"] == {
        "5/1/0": {"context": "5", "worker": 1, "place": 0, "name": "w", "shape": "[3, 4]", "bytes": 48},
        "5/1/1": {"context": "5", "worker": 1, "place": 1, "name": "", "shape": "[]", "bytes": 4},
    }


def graph(sends=(), recvs=(), parts=(), ended=None, **more):
    """What a worker tells of a context while somebody watches."""
    about = {"label": "f", "shape": "[3]", "bytes": 12, "back": None}
    row = {"context": 5, "leaves": [], "more": 0, "gradients": 1, "passes": [], "made": 1.0, "ended": ended}
    parts = [{"ops": ["Mul"], "count": 1, "ran": [], "recvs": [], **one} for one in parts]
    return {**row, "sends": [{**about, **send} for send in sends], "recvs": list(recvs), "parts": parts, **more}


def halves(back=None, ran=(), ended=None):
    """Worker 0 sends message 1 to worker 1, which has sent 2 for it."""
    here = graph([{"message": 1, "to": 1, "back": back}], parts=[{"sends": [1]}], ended=ended)
    part = {"sends": [2], "recvs": [1], "ran": list(ran)}
    there = graph(recvs=[{"message": 1, "from": 0}], parts=[part], ended=ended)
    return {"graphs": {"5": here}}, {"graphs": {"5": there}}


def test_a_released_context_keeps_its_last_numbers_and_nothing_is_in_flight():
    view = autograd_view(world(*halves(ended=9.0)))
    assert view["members"]["5/1"] == {"context": "5", "worker": 1, "sends": 0, "recvs": 1, "gradients": 1}
    assert view["links"]["5/0>1"]["state"] == "paired" and view["contexts"]["5"]["ended"] == 9.0
    here, there = halves(ended=9.0)
    there["graphs"]["5"]["recvs"] = []
    view = autograd_view(world(here, there))
    assert (view["links"]["5/0>1"]["state"], view["contexts"]["5"]["open"]) == ("lost", 0)
    assert "released" in summarize_view(view)


def test_no_more_messages_are_received_than_were_sent_where_the_sender_is_gone():
    there = {"contexts": {"5": context(recvs=[{"message": 1, "from": 0}])}}
    (row,) = autograd_view(world({}, there))["contexts"].values()
    assert (row["sends"], row["recvs"]) == (1, 1)


def test_a_context_is_open_until_its_maker_has_released_it():
    here, there = halves(ended=9.0)
    both = {"contexts": {"5": context(sends=[{"message": 1, "to": 1}])}, **here}
    both["graphs"]["5"]["ended"] = None
    assert autograd_view(world(both, there))["contexts"]["5"]["ended"] is None
    late = {"contexts": {"5": context(recvs=[{"message": 1, "from": 0}])}, **there}
    here["graphs"]["5"]["ended"] = 9.0
    assert autograd_view(world(here, late))["contexts"]["5"]["ended"] == 9.0


@pytest.mark.parametrize(
    ("back", "ran", "passes", "gradient", "state"),
    [
        (None, (), 1, (0, 0), ""),
        (None, (2.0,), 1, (0, 0), "runs"),
        (None, (2.0,), 0, (0, 0), "failed"),
        (None, (2.0, 2.5), 1, (1, 0), "ran"),
        (None, (2.0, 2.5), 0, (0, 0), "ran"),
        (3.0, (2.0, 2.5), 0, (1, 1), "ran"),
    ],
)
def test_the_gradient_of_a_message_is_sent_back_once_the_part_that_received_it_has_run(
    back, ran, passes, gradient, state
):
    here, there = halves(back, ran)
    one = {"pass": "0.1", "state": "running", "needed": 1, "arrived": 1, "waiting": 0}
    here["contexts"] = {"5": context(sends=[{"message": 1, "to": 1}])}
    there["contexts"] = {"5": context(recvs=[{"message": 1, "from": 0}], passes=[one] * passes)}
    view = autograd_view(world(here, there))
    message, part = view["messages"]["5/1"], view["parts"]["5/1/0"]
    assert (message["fired"], message["back"]) == gradient
    assert (message["shape"], message["bytes"], message["received"]) == ("[3]", 12, 1)
    assert (part["state"], part["seconds"]) == (state, 0.5 if state == "ran" else None)


@pytest.mark.parametrize("first_tells", [True, False])
def test_a_gradient_is_not_in_flight_once_a_later_one_shows_that_it_came(first_tells):
    """Worker 1 passes on what it received from worker 0, and reports later than its neighbours."""
    here = graph([{"message": 1, "to": 1, "back": 4.0 if first_tells else None}], parts=[{"sends": [1]}])
    middle = graph([{"message": 2, "to": 2}], [{"message": 1, "from": 0}], [{"sends": [2], "recvs": [1]}])
    there = graph(recvs=[{"message": 2, "from": 1}], parts=[{"sends": [-1], "recvs": [2], "ran": [2.0, 2.5]}])
    one = {"pass": "2.1", "state": "running", "needed": 0, "arrived": 0, "waiting": 1}
    at = world(*({"graphs": {"5": row}, "contexts": {"5": context(passes=[one])}} for row in (here, middle, there)))
    messages = autograd_view(at)["messages"]
    found = {key: (row["fired"], row["back"]) for key, row in messages.items()}
    assert found == ({"5/1": (1, 1), "5/2": (1, 1)} if first_tells else {"5/1": (0, 0), "5/2": (1, 0)})


def test_messages_of_a_pipeline_are_one_for_each_stage_with_the_gradients_of_its_operations():
    label = "F{} for stage 1"
    here = graph([{"message": m, "to": 1, "label": label.format(m)} for m in (1, 2)], step=3, stages={"0": ["Linear"]})
    there = graph(recvs=[{"message": m, "from": 0} for m in (1, 2)], step=3, stages={"1": ["Relu", "Linear"]})
    op = {"step": 3, "worker": 1, "stage": 1, "bytes": 0, "held": 0, "failed": False}
    ops = [{**op, "op": "F", "microbatch": m, "begin": m, "end": m + 0.5} for m in (0, 1)]
    ops += [{**op, "op": "B", "microbatch": 0, "begin": 2.0, "end": 3.0}]
    tables = {"graphs": {"5": there}, "contexts": {"5": context()}, "ops": {str(n): one for n, one in enumerate(ops)}}
    view = autograd_view(world({"graphs": {"5": here}, "contexts": {"5": context()}}, tables))
    (message,) = view["messages"].values()
    assert (message["stage"], message["sent"], message["bytes"], message["back"]) == (1, 2, 24, 1)
    part = view["parts"]["5/1/0"]
    assert (part["stage"], part["ops"], part["state"]) == (1, ["Relu", "Linear"], "runs")
    assert (part["done"], part["times"]) == (1, 2)
    ops.append({**op, "op": "B", "microbatch": 1, "begin": 4.0, "end": 4.5})
    tables["ops"]["3"] = ops[-1]
    part = autograd_view(world({"graphs": {"5": here}}, tables))["parts"]["5/1/0"]
    assert (part["state"], part["seconds"]) == ("ran", 1.5)
    assert autograd_view(world({}, tables))["contexts"]["5"]["step"] == 3


def test_context_ids_survive_javascript():
    big = str(40 << 48 | 1)
    view = autograd_view(world({"contexts": {big: context()}}))
    assert view["contexts"][big]["context"] == big


# ---- all views


@pytest.mark.parametrize("view", VIEWS)
def test_an_empty_world_is_a_view_too(view):
    assert all(rows == {} for rows in view({}).values())
    assert summarize_view(view({})).startswith("0 members, 0 ")


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_plain_data_and_leave_the_world_alone(view):
    tables = {
        "owned": {"0.1": owned({"fork": "0.2", "holder": 1})},
        "users": {"0.2": user("0.2", 0, children=[{"fork": "0.3", "to": 1}])},
        "contexts": {"5": context(sends=[{"message": 1, "to": 1}])},
        "ops": {"a": op(1, "F", 0, 1.0, 2.0)},
    }
    at = world(tables, {})
    before = json.dumps(at)
    seen = view(at)
    assert json.loads(json.dumps(seen)) == seen
    assert json.dumps(at) == before


def test_text_counts_names_and_cuts():
    forks = {f"0.{i}": user(f"0.{i}", 1, "pending", rref=f"1.{i}") for i in range(LINES + 3)}
    at = world({"users": forks}, {})
    at[1]["left_out"] = 4
    lines = summarize_view(rref_view(at)).splitlines()
    assert lines[0] == "2 members, 15 RRefs, 15 forks, 15 pending (4 events left out)"
    assert lines[1] == "  1.0 Tensor on w1: on its way, used by w0 (pending)"
    assert lines[-1] == "  … and 3 more"
    assert len(lines) == LINES + 2


def test_text_of_contexts_and_steps():
    one = {"pass": "0.1", "state": "running", "needed": 8, "arrived": 3, "waiting": 2}
    at = world({"contexts": {"5": context(sends=[{"message": 1, "to": 1}], passes=[one], gradients=1)}}, {})
    assert summarize_view(autograd_view(at)).splitlines()[1] == (
        "  context 5 on 1 member: 1 send, 0 recvs, 1 gradient, backward runs (5 gradients to come)"
    )
    at = world({}, {"ops": {"a": op(1, "F", 0, 1.0, 1.25), "b": op(1, "B", 0, 1.75, 2.0)}})
    assert summarize_view(pipeline_view(at)).splitlines()[1] == "  step 1 (running): 2 ops in 1000.0 ms"
    part = {"step": 1, "worker": 1, "workers": [1], "plan": ["0F0", "0B0"], "ideal": 0.25, "state": "done"}
    at[1]["tables"]["steps"] = {"a": part}
    assert summarize_view(pipeline_view(at)).splitlines()[1] == (
        "  step 1 (complete): 2 ops in 1000.0 ms, bubble 50.0% (minimum 25.0%)"
    )


def test_text_refuses_what_is_no_view():
    with pytest.raises(ValueError, match="not a view"):
        summarize_view({"workers": {}})


# ---- deltas

rows = st.dictionaries(st.text("ab", max_size=1), st.integers(0, 2), max_size=2)
views = st.dictionaries(st.sampled_from("xyz"), st.dictionaries(st.sampled_from("pqrs"), rows, max_size=4), max_size=3)


@given(views, views)
def test_a_delta_turns_the_old_view_into_the_new(old, new):
    copy = json.loads(json.dumps(old))
    delta = json.loads(json.dumps(diff_views(old, new)))
    assert patch_view(old, delta) == new
    assert old == copy


@given(views)
def test_no_change_is_no_delta(view):
    assert diff_views(view, json.loads(json.dumps(view))) == {}


@given(views, views)
def test_a_delta_carries_changed_rows_only(old, new):
    for section, change in diff_views(old, new).items():
        for key, row in (change or {"set": {}})["set"].items():
            assert old.get(section, {}).get(key) != row
