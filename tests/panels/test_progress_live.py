"""The progress panel of a real cluster: maps, of which items fail, lost workers, a training loop, and cells."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from worlds import PATIENCE, cluster_fixture, until

import rpcbench
from rpcbench.base.errors import WorkerLostError
from rpcbench.cells.cell_log import CellLog
from rpcbench.cells.client import CellClient, CellInputs, CellOptions
from rpcbench.cells.display import OutputDisplay, unseen_areas
from rpcbench.pipeline import Pipeline, split
from rpcbench.telemetry import collector
from rpcbench.telemetry.progress_view import progress_view
from rpcbench.telemetry.summary import summarize_view

pytestmark = pytest.mark.process

cluster = cluster_fixture(2, scope="function")


@pytest.fixture
def seen(cluster):
    """`seen()`: the view that a panel has, once all members have reported."""
    source = collector.current_collector()
    stop = source.subscribe(lambda: None)

    def look():
        assert source.settle(PATIENCE)
        return progress_view(source.world())

    yield look
    stop()


def test_the_last_picture_of_a_stopped_cluster_has_no_cell_that_runs(cluster, seen):
    cluster.agent.part(CellLog).begin_cell("%cluster stop", [(0, "notebook")], None)
    seen()
    source = collector.current_collector()
    cluster.shutdown()
    (row,) = progress_view(source.world())["cells"].values()
    assert (row["state"], row["how"]) == ("stopped", "until the stop") and row["lasted"] is not None


def last_job(view):
    return max(view["jobs"].values(), key=lambda row: row["order"])


def refuse_seven(item):
    if item == 7:
        raise ValueError("seven is too many")
    return item


def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return path


def end_process(item):
    if item == 3:
        os._exit(1)
    return item


def test_what_runs_and_waits_is_seen_while_it_does(cluster, seen, tmp_path):
    paths = [str(tmp_path / str(n)) for n in range(9)]
    results = cluster.map(wait_for_file, paths)
    taken: list[str] = []
    thread = threading.Thread(target=lambda: taken.extend(results))
    thread.start()
    until(lambda: last_job(seen())["running"] == 2)
    row = last_job(seen())
    assert (row["name"], row["total"], row["done"], row["state"]) == ("wait_for_file", 9, 0, "runs")
    (tmp_path / "0").touch()
    until(lambda: last_job(seen())["done"] == 1)
    for path in paths:
        open(path, "w").close()
    thread.join(PATIENCE)
    row = last_job(seen())
    assert (row["state"], row["done"], row["running"], taken) == ("done", 9, 0, paths)
    assert row["rate"] > 0 and abs(row["end"] - time.time()) < PATIENCE and 0 < row["lasted"] < PATIENCE


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failing_item_is_told_with_its_number(cluster, seen, ordered):
    with pytest.raises(ValueError, match="seven"):
        list(cluster.map(refuse_seven, range(20), ordered=ordered))
    row = last_job(seen())
    assert (row["state"], row["failed"], row["running"]) == ("failed", 1, 0) and row["ended"] < 20
    assert row["error"] == "ValueError: seven is too many, while cluster.map ran item 7: 7"
    assert "(failed: ValueError: seven is too many" in summarize_view(seen())


def test_a_lost_worker_fails_its_item(cluster, seen):
    with pytest.raises(WorkerLostError):
        list(cluster.map(end_process, range(9)))
    row = last_job(seen())
    assert (row["state"], row["failed"]) == ("failed", 1) and row["error"].startswith("WorkerLostError: ")


def test_a_fit_is_seen_with_its_loss(cluster, seen):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    stages = split(model, cluster.workers)
    pipe = Pipeline(stages, microbatches=2, loss_fn=functional.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 0.1}))
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(5)]
    running = []
    history = pipe.fit(batches, 2, on_step=lambda _: running.append(last_job(seen())), progress=False)
    assert [row["done"] for row in running] == [*range(1, 11)] and {row["state"] for row in running} == {"runs"}
    row = last_job(seen())
    assert (row["kind"], row["name"], row["total"], row["state"]) == ("fit", "Sequential", 10, "done")
    assert row["note"].startswith(f"epoch 2 of 2, loss {history.losses[-1]:.4g}")


def cells(view):
    """(where, how it ended) of each cell, in order."""
    rows = sorted(view["cells"].values(), key=lambda row: row["order"])
    return [(row["where"], row["how"]) for row in rows]


def test_cells_are_seen_with_their_workers_prompts_and_ends(cluster, seen):
    cluster.run("all", "x = 1")
    with pytest.raises(KeyError):
        cluster.run("worker2", "import time\ntime.sleep(0.2)\n{}['key']")
    until(lambda: cells(seen()) == [("worker1-2", "ok"), ("worker2[2]", "KeyError: 'key'")])
    view = seen()
    row = view["cells"]["2"]
    assert row["line"] == "import time" and 0.2 <= row["ran"] <= row["lasted"] < PATIENCE
    assert abs(row["began"] - time.time()) < PATIENCE
    text = summarize_view(view)
    assert "  worker2[2], " in text and "(KeyError: 'key'): import time" in text


def test_a_cell_waits_behind_another_one_and_an_interrupt_ends_that(cluster, seen, tmp_path):
    began = tmp_path / "began"
    first = f"import time\nopen({str(began)!r}, 'w').close()\ntime.sleep(60)"
    threads = [threading.Thread(target=run_anyway, args=(cluster, code)) for code in (first, "y = 2")]
    threads[0].start()
    until(began.exists)
    threads[1].start()
    until(lambda: cells(seen()) == [("worker1", "running"), ("worker1", "waiting")])
    assert [row["lasted"] for row in seen()["cells"].values()] == [None, None]
    cluster.interrupt("worker1")
    for thread in threads:
        thread.join(PATIENCE)
    until(lambda: cells(seen()) == [("worker1[1]", "interrupted"), ("worker1[2]", "ok")])


def test_a_cell_that_is_interrupted_before_its_turn_never_began(cluster, seen, tmp_path):
    began, go_on = tmp_path / "began", tmp_path / "go_on"
    code = f"import os, time\nopen({str(began)!r}, 'w').close()\n"
    code += f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)"
    client = cluster.agent.part(CellClient)
    display, options = OutputDisplay(None), CellOptions(areas=unseen_areas)
    for each in (code, "y = 2"):
        sent = client.start_on_workers(display, ["worker1"], each, CellInputs(), options, lambda: None)
    until(began.exists)
    sent.interrupt()
    (part,) = sent._parts
    assert part.output_buffer.interrupt_handled.wait(PATIENCE)  # else its turn might come before the interrupt
    go_on.touch()
    until(lambda: cells(seen()) == [("worker1[1]", "ok"), ("worker1", "interrupted")])
    first, second = seen()["cells"].values()
    assert first["ran"] > 0 and second["ran"] == 0 < second["lasted"]


def run_anyway(cluster, code):
    try:
        cluster.run("worker1", code)
    except KeyboardInterrupt:
        pass


def test_a_cell_of_a_lost_worker_is_lost_and_its_restart_lists_no_cell(cluster, seen):
    cluster.run("all", "x = 1")
    with pytest.raises(WorkerLostError):
        cluster.run("all", f"import os\nif os.getpid() == {cluster.pid('worker2')}:\n    os._exit(1)")
    assert cells(seen())[1] == ("worker1-2", "lost on worker2, ok on worker1")
    cluster.restart("worker2", replay=True)
    assert len(cells(seen())) == 2


def test_a_record_has_jobs_and_cells_and_is_played(cluster, tmp_path):
    with rpcbench.record(tmp_path / "work.json"):
        list(cluster.map(abs, range(5)))
        with pytest.raises(ZeroDivisionError):
            cluster.run("worker1", "1 / 0")
    made = rpcbench.replay(tmp_path / "work.json", "progress")
    try:
        view = made.panel.latest_view()
    finally:
        made.close()
    assert (last_job(view)["state"], last_job(view)["ended"]) == ("done", 5)
    assert cells(view)[-1] == ("worker1[1]", "ZeroDivisionError: division by zero")
