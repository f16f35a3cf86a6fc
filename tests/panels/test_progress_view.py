"""The view of the progress panel: jobs as rows with times of the calendar, their words, the still."""

from __future__ import annotations

import json

import pytest
from pictures import job, ran, world

from rpcbench.telemetry.progress_view import progress_view
from rpcbench.telemetry.record_schema import check_delta
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.svg import Snapshot


def test_a_row_has_the_counts_and_the_time_of_the_calendar():
    at = world(2)
    job(at, 1)
    job(at, 2, state="done", end=61.5)
    view = progress_view(at)
    assert json.loads(json.dumps(view)) == view
    runs, ended = view["jobs"].values()
    assert (runs["ended"], runs["began"], runs["counted"], runs["end"]) == (13, 1_700_000_050.0, 1_700_000_060.0, None)
    assert (runs["lasted"], ended["lasted"], ended["end"]) == (None, 11.5, 1_700_000_061.5)
    at[0]["epoch"] = None
    assert progress_view(at)["jobs"]["1"]["began"] is None, "no report has told the member's clock"


def test_a_job_of_a_record_without_cancelled_items_has_none():
    at = world(1)
    job(at, 1)
    row = at[0]["tables"]["jobs"]["1"]
    del row["cancelled"]
    check_delta({"0 jobs": {"set": {"1": row}, "drop": []}}, "frame 1")
    assert progress_view(at)["jobs"]["1"]["cancelled"] == 0


def test_a_job_of_a_worker_has_a_key_of_its_own():
    at = world(1)
    job(at, 1)
    at[1]["tables"]["jobs"] = at[0]["tables"]["jobs"]
    assert {key: row["worker"] for key, row in progress_view(at)["jobs"].items()} == {"1": 0, "1.1": 1}


def test_its_text_has_a_line_for_each_job_the_latest_first():
    at = world(1)
    job(at, 1, state="failed", error="ValueError: no", running=0, cancelled=2, rate=None, number=None)
    job(at, 2, "Net", kind="fit", unit="step", total=None, failed=0, running=0, note="epoch 1 of 3, loss 0.5")
    assert summarize_view(progress_view(at)).splitlines() == [
        "2 members, 2 jobs, 1 running, 1 failed, 0 cells",
        "  fit Net in [2]: 12 steps done, 1.3 steps/s, epoch 1 of 3, loss 0.5 (running)",
        "  map score: 12 of 20 items done, 1 failed, 2 cancelled (failed: ValueError: no)",
    ]
    assert summarize_view(progress_view(world(1))) == "2 members, 0 jobs, 0 cells"


def test_records_may_have_it_and_a_wrong_row_is_refused():
    at = world(1)
    job(at, 1)
    row = at[0]["tables"]["jobs"]["1"]
    check_delta({"0 jobs": {"set": {"1": row}, "drop": []}}, "frame 1")
    with pytest.raises(ValueError, match=r"frame 1, section '0 jobs', row '1': .*running"):
        check_delta({"0 jobs": {"set": {"1": {**row, "running": "2"}}, "drop": []}}, "frame 1")


def test_its_still_has_bars_and_counts():
    pytest.importorskip("quickjs", reason="needs quickjs-ng, which the extra `lab` installs")
    at = world(1)
    job(at, 1, "<b>name</b>", done=1234, failed=0, running=0, total=2000)
    drawn = Snapshot(progress_view(at)).svg
    assert "&lt;b&gt;name&lt;/b&gt;" in drawn and "1,234 of 2,000 items done, 766 waiting" in drawn
    assert 'class="rb-part rb-done"' in drawn and 'class="rb-part rb-failed"' not in drawn
    assert ">10 s<" in drawn, "a still has no present: the time of the last count stands there"


def test_a_cell_has_its_first_line_its_workers_and_its_times():
    at = world(2)
    ran(at, 1)
    ran(at, 2, [1, "worker1", "runs", "", None, None, None], code="\n  \n  if x:\n    pass")
    view = progress_view(at)
    done, runs = view["cells"].values()
    assert (done["line"], done["where"], done["how"], done["state"]) == ("y = x.sum()", "worker1[8]", "ok", "ok")
    assert (done["began"], done["lasted"], done["ran"]) == (1_700_000_050.0, 1.5, 1.2)
    assert (runs["line"], runs["state"], runs["lasted"], runs["ran"]) == ("if x:", "runs", None, None)


def test_of_several_workers_those_that_differ_are_named():
    at = world(3)
    parts = [[n, f"worker{n}", "ok", "", 51.0, 1, 0.5] for n in (1, 2, 3)]
    parts[1][2:4] = "error", "KeyError: 3"
    ran(at, 1, *parts)
    (row,) = progress_view(at)["cells"].values()
    assert (row["where"], row["state"]) == ("worker1-3", "error")
    assert row["how"] == "KeyError: 3 on worker2, ok on worker1, worker3"


def test_a_cell_waits_behind_an_earlier_one_of_the_same_worker():
    at = world(2)
    for order, worker in ((1, 1), (2, 1), (3, 2), (10, 1)):
        ran(at, order, [worker, f"worker{worker}", "runs", "", None, None, None])
    assert [row["state"] for row in progress_view(at)["cells"].values()] == ["runs", "waits", "runs", "waits"]


def part(state, end=None, seconds=None, worker=1):
    number = None if seconds is None else 1
    return [worker, f"worker{worker}", state, "", end, number, seconds]


def test_the_time_in_which_a_cell_waited_for_its_turn_is_not_that_of_its_run():
    at = world(2)
    ran(at, 1, part("runs"), began=10.0)
    ran(at, 2, part("interrupted", end=13.0), began=11.0)  # dropped before it was sent: the worker has said nothing
    ran(at, 3, part("error", end=13.0), part("ok", 13.0, 0.5, worker=2), began=11.0)
    view = progress_view(at)
    assert [(row["lasted"], row["ran"]) for row in view["cells"].values()] == [(None, None), (2.0, 0.0), (2.0, 0.5)]
    assert ", never began (interrupted): y" in summarize_view(view)


@pytest.mark.parametrize("state", ["lost", "stopped"])
def test_a_cell_that_was_cut_with_its_worker_ran_since_the_one_before_it_had_ended(state):
    at = world(1)
    ran(at, 1, part("ok", 20.0, 9.9), began=10.0)
    ran(at, 2, part(state, end=25.0), began=11.0)
    ran(at, 3, part(state, end=25.001), began=12.0)
    ran(at, 4, part(state, end=30.0), began=26.0)  # on the worker that was started again
    assert [row["ran"] for row in progress_view(at)["cells"].values()] == [9.9, 5.0, 0.0, 4.0]


def test_a_cell_that_has_waited_runs_since_the_one_before_it_has_ended():
    at = world(1)
    ran(at, 1, part("ok", 20.0, 9.9), began=10.0)
    ran(at, 2, part("runs"), began=11.0)
    ran(at, 3, part("runs"), began=12.0)
    rows = [(row["state"], row["since"]) for row in progress_view(at)["cells"].values()]
    assert rows == [("ok", None), ("runs", 1_700_000_020.0), ("waits", None)]


def test_the_text_has_cells_after_jobs_and_records_may_have_them():
    at = world(1)
    job(at, 3)
    ran(at, 1, code="x = '<b>'")
    ran(at, 2, [1, "worker1", "runs", "", None, None, None], number=None)
    assert summarize_view(progress_view(at)).splitlines() == [
        "2 members, 1 job, 1 running, 2 cells, 1 not ended",
        "  map score in [3]: 12 of 20 items done, 2 running, 1 failed, 1.3 items/s (running)",
        "  worker1 (running): y = x.sum()",
        "  worker1[8] in [1], 1.20 s (ok): x = '<b>'",
    ]
    row = at[0]["tables"]["cells"]["1"]
    check_delta({"0 cells": {"set": {"1": row}, "drop": []}}, "frame 1")
    with pytest.raises(ValueError, match=r"row '1': .*parts"):
        check_delta({"0 cells": {"set": {"1": {**row, "parts": [[1, "worker1"]]}}, "drop": []}}, "frame 1")
    pytest.importorskip("quickjs", reason="needs quickjs-ng, which the extra `lab` installs")
    drawn = Snapshot(progress_view(at)).svg
    assert "x = '&lt;b&gt;'" in drawn and "worker1[8]" in drawn and "<button" not in drawn
