"""The view of the progress panel: jobs as rows with times of the calendar, their words, the still."""

from __future__ import annotations

import json

import pytest
from pictures import job, world

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


def test_a_job_of_a_worker_has_a_key_of_its_own():
    at = world(1)
    job(at, 1)
    at[1]["tables"]["jobs"] = at[0]["tables"]["jobs"]
    assert {key: row["worker"] for key, row in progress_view(at)["jobs"].items()} == {"1": 0, "1.1": 1}


def test_its_text_has_a_line_for_each_job_the_latest_first():
    at = world(1)
    job(at, 1, state="failed", error="ValueError: no", running=0, rate=None, number=None)
    job(at, 2, "Net", kind="fit", unit="step", total=None, failed=0, running=0, note="epoch 1 of 3, loss 0.5")
    assert summarize_view(progress_view(at)).splitlines() == [
        "2 members, 2 jobs, 1 running, 1 failed",
        "  fit Net in [2]: 12 steps, 1.3 steps/s, epoch 1 of 3, loss 0.5 (running)",
        "  map score: 13 of 20 items, 1 failed (failed: ValueError: no)",
    ]
    assert summarize_view(progress_view(world(1))) == "2 members, 0 jobs"


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
    assert "&lt;b&gt;name&lt;/b&gt;" in drawn and "1,234 of 2,000 items, 766 waiting" in drawn
    assert 'class="rb-part rb-done"' in drawn and 'class="rb-part rb-failed"' not in drawn
    assert ">10 s<" in drawn, "a still has no present: the time of the last count stands there"
