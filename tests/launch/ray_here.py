"""Helpers for tests with Ray: a private Ray, clusters in it, and checks that nothing of them is left."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile

import psutil
import pytest

from rpcbench import Cluster

START = {"include_dashboard": False, "log_to_driver": False}
MARKS = [
    pytest.mark.process,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),  # Ray ends them without a wait
]


@contextlib.contextmanager
def prepared(leak_check):
    """Prepare a private Ray, which the block may start; it reports no usage and starts no processes in advance.

    Its folder is its own, so that it joins neither a Ray that runs here nor the left address of one that has ended.
    """
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install ray")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(
            prefix="ray", ignore_cleanup_errors=True
        ) as folder,  # a short path, as sockets are in it
        leak_check(30.0, descriptors=False),
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONBREAKPOINT", "")  # Ray sets it; it is restored afterwards
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        import ray

        try:
            yield
        finally:
            ray.shutdown()


def begun(begin):
    """Call `begin`, which starts a part of Ray, up to three times: a busy machine may exceed the 15 s of Ray."""
    import ray

    for _ in range(2):
        try:
            begin()
            return
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error):
                raise
    begin()


def start(n, patience=60.0, **options):
    """A cluster of `n` workers with half a CPU each; the notebook listens on loopback only.

    The grace is that of a worker whose actor is lost; tests wait longer than that for its end.
    """
    options = {"cpus": 0.5, **options}
    return Cluster(n, launcher="ray", options=options, address="127.0.0.1", grace=5.0, patience=patience)


def groups():
    """The placement groups that have not been removed."""
    from ray.util.placement_group import placement_group_table

    return [each for each in placement_group_table().values() if each["state"] != "REMOVED"]


def outposts():
    """The supervisors of workers."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if (each.info["cmdline"] or [])[1:4] == ["-P", "-m", "rpcbench.worker"]]


def free():
    """The number of CPUs that Ray has free."""
    import ray

    return ray.available_resources().get("CPU", 0.0)
