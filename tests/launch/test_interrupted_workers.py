"""An interrupt says on which workers a cell ran, and how the calls to the others end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worlds import until

import rpcbench
from rpcbench.launch.actions import interrupt_workers


class Cluster:
    """One whose first worker runs a cell."""

    def interrupt(self, name):
        return name == "worker1"


def test_workers_with_a_cell_and_without_are_told_apart():
    ends = "A call, or a step of a pipeline, ends with the cell here that waits for it: use the notebook's stop button."
    assert interrupt_workers(Cluster(), ["worker1"]) == "Interrupted: worker1."
    assert interrupt_workers(Cluster(), ["worker2"]) == f"worker2 runs no cell of this notebook. {ends}"
    both = interrupt_workers(Cluster(), ["worker1", "worker2", "worker3"])
    assert both == f"Interrupted: worker1. worker2, worker3 run no cell of this notebook. {ends}"


@pytest.mark.process
def test_a_worker_is_known_to_run_a_cell(tmp_path: Path):
    began = tmp_path / "began"
    code = f"import pathlib, time\npathlib.Path({str(began)!r}).touch()\nwhile True:\n    time.sleep(0.01)"
    with rpcbench.Cluster(2) as cluster, ThreadPoolExecutor(1) as pool:
        assert not cluster.interrupt("worker1")
        runs = pool.submit(cluster.run, "worker1", code)
        until(began.exists)
        assert not cluster.interrupt("worker2") and cluster.interrupt("worker1")
        with pytest.raises(KeyboardInterrupt, match="the cell was interrupted"):
            runs.result()
        assert not cluster.interrupt("worker1")
