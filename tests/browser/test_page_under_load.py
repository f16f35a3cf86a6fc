"""A page that is too slow for what it is sent: its panels are a few seconds late at most, and it goes on to answer."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(600), pytest.mark.long]

START = "%load_ext rpcbench\n%cluster start 2"
TRAIN = """import pathlib, time, torch
from torch import nn
from rpcbench.pipeline import Pipeline, split
stages = split(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), cluster.workers)
pipe = Pipeline(stages, microbatches=4, optimizer=(torch.optim.SGD, {"lr": 0.1}), loss_fn=nn.functional.mse_loss)
began, done = time.monotonic(), []
def note_step(*_, **__):
    done.append(time.time())
    if time.monotonic() - began > 25:
        pathlib.Path("times").write_text("\\n".join(map(str, done)))
        raise KeyboardInterrupt
pipe.fit([(torch.randn(64, 64), torch.randn(64, 8))] * 20, epochs=10_000, on_step=note_step)"""
SLOWDOWN = 6  # of the page's thread
LATE_SECONDS = 15.0  # fivefold of what is allowed; without backpressure the page was 30 to 80 s late


def test_a_slow_page_is_late_by_seconds_and_not_by_a_queue(show, lab):
    notebook = show([START, TRAIN], "slow.ipynb")
    page = notebook.page
    notebook.run_to_end(START)
    page.evaluate("jupyterapp.commands.execute('rpcbench:dashboard')")
    progress = page.locator(".rb-panel.rb-progress")
    progress.locator(".rb-chip", has_text="Live").wait_for()
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": SLOWDOWN})
    notebook.activate()
    notebook.run(TRAIN)
    seen = []  # the time, and the steps that the page shows then
    file = Path(lab.folder) / "times"
    while not file.exists():
        found = re.search(r"([\d,]+) of 200,000 steps", progress.inner_text())
        seen.append((time.time(), int(found[1].replace(",", "")) if found else 0))
        page.wait_for_timeout(500)
    times = [float(line) for line in file.read_text().splitlines()]
    late = [at - times[count] for at, count in seen if 0 < count < len(times)]  # since the next step ended
    assert len(late) > 5
    assert max(late) < LATE_SECONDS
