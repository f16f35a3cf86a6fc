"""Workers on several nodes of a Ray cluster; and in a Ray that the launcher starts itself, as in the documentation.

The nodes are processes of this machine; Ray treats them as machines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from launch_bench import until
from ray_here import MARKS, begun, free, groups, prepared, start

from rpcbench.transport import hosts

pytestmark = MARKS

PAGE = (Path(__file__).parents[2] / "docs" / "past-one-machine.md").read_text()
CHECKS = """
import os, ray
assert ray.is_initialized() and os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
with cluster:
    assert cluster.run("all", "6 * 7") == dict.fromkeys(cluster.workers, 42)
    with rpcbench.Cluster(1, launcher="ray", options={"cpus": 0.1}) as other:
        assert other.run("worker1", "6 * 7") == 42
    assert ray.is_initialized()
assert not ray.is_initialized()
"""


def test_each_worker_gets_its_own_node_if_there_are_enough(leak_check):
    with prepared(leak_check):
        import ray
        from ray.cluster_utils import Cluster

        from rpcbench.launch.ray_launcher import Places

        nodes = Cluster()
        try:
            begun(lambda: nodes.add_node(num_cpus=1, include_dashboard=False))  # the head
            begun(lambda: nodes.add_node(num_cpus=1))
            begun(lambda: nodes.add_node(num_cpus=2))
            ray.init(address=nodes.address, log_to_driver=False)
            with start(3, cpus=1) as cluster:
                (group,) = groups()
                assert len(set(group["bundles_to_node_id"].values())) == 3
                assert cluster.run("all", "6 * 7") == dict.fromkeys(cluster.workers, 42)
                places = Places({"CPU": 0.5}, "")
                places.take_bundles(2, "two more, of which one node has room for both", 10.0)
                places.remove_groups()
            until(lambda: free() == 4.0)
        finally:
            ray.shutdown()
            nodes.shutdown()


def test_the_example_of_the_documentation_starts_and_ends_ray(leak_check, monkeypatch):
    (block,) = (each for each in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if '"ray"' in each)
    monkeypatch.setenv(hosts.BIND_VARIABLE, "127.0.0.1")
    command = [sys.executable, "-W", "error", "-c", f"import rpcbench\n{block}\n{CHECKS}"]
    with prepared(leak_check):
        environ = {name: value for name, value in os.environ.items() if name != "RAY_USAGE_STATS_ENABLED"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
