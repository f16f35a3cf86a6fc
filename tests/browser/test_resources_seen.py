"""The panels of resources and traffic in JupyterLab: the figures of real workers, a restart, and the end."""

from __future__ import annotations

import re

import pytest
from worlds import until

pytest.importorskip("playwright", reason="needs playwright")

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

START = "%load_ext rpcbench\n%cluster start 2"
PANELS = ["%panel resources", "%panel traffic"]
SENDS = """import torch, rpcbench.rpc as rpc
for _ in range(5):
    rpc.rpc_sync("worker1", torch.numel, (torch.ones(1_000_000),))"""
RESTARTS = "cluster.restart('worker2')"
SENT = "cluster.rpc_sync('worker1', own)['peers']['0'][1]"
OWN = """from rpcbench.runtime.current import current_agent
def own():
    return current_agent().tables()["health"]["1"]"""
STOPS = "%cluster stop"


def megabytes(text):
    return float(re.fullmatch(r"([\d.]+) MB", text)[1])


@pytest.mark.long
def test_figures_of_real_workers(lab):
    notebook = lab.open((START, *PANELS, SENDS, RESTARTS, STOPS), "resources.ipynb", height=2500)
    page = notebook.page
    notebook.run_to_end(START, *PANELS)
    charts, matrix = page.locator(".rb-resources"), page.locator(".rb-traffic")
    charts.locator("tr[data-member='2']").wait_for()
    matrix.locator("[data-sender='2']").wait_for()
    assert [one.inner_text() for one in charts.locator("tbody th").all()] == ["all", "notebook", "worker1", "worker2"]
    matrix.get_by_label("Time that is shown").select_option("2")
    notebook.run_to_end(SENDS)

    def sent():
        shown = matrix.locator("[data-sender='0'] .rb-number").all_text_contents()
        return shown and "MB" in shown[0] and megabytes(shown[0])

    until(lambda: sent() and sent() >= 20, "the bytes of the cell")
    told = notebook.value(SENT, after=OWN)
    assert abs(sent() - told / 1e6) < 0.1
    until(lambda: "shared memory" in matrix.locator(".rb-words").inner_text(), "the pair in words")
    notebook.run_to_end(RESTARTS)
    charts.locator(".rb-of-cpu .rb-began").wait_for(state="attached")
    assert "worker2 was started again" in charts.locator(".rb-of-cpu .rb-began title").text_content()
    notebook.run_to_end(STOPS)
    for panel in (charts, matrix):
        panel.locator(".rb-chip", has_text="Stopped").wait_for()
    assert charts.locator(".rb-chart").count() == 3 and sent() >= 20, "the last picture stays"
