"""What the tests with Ray share: a Ray of their own, clusters in it, and what is left of them."""

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
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),  # Ray ends them, and forgets
]


@contextlib.contextmanager
def prepared(leak_check):
    """Inside Ray may be started and is to be shut down; it is told of nobody, and starts nothing in advance.

    It is in a folder of its own, so it neither joins a Ray that runs here nor one whose end has left its address there.
    """
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'rpcbench[ray]'")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,  # short: sockets lie in it
        leak_check(30.0, descriptors=False),
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONBREAKPOINT", "")  # Ray sets it; afterwards it is what it was
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        import ray

        try:
            yield
        finally:
            ray.shutdown()


def begun(begin):
    """Call `begin`, which starts a part of Ray; three times at most: a busy machine may miss the 15 s of Ray."""
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


def start(n, **options):
    """A cluster of `n` workers with half a CPU each; the notebook is found on loopback only.

    `grace`: of a worker whose actor is lost, which is less than tests wait for its end.
    """
    return Cluster(n, launcher="ray", options={"cpus": 0.5, **options}, address="127.0.0.1", grace=5.0)


def groups():
    """The placement groups that are not removed."""
    from ray.util.placement_group import placement_group_table

    return [each for each in placement_group_table().values() if each["state"] != "REMOVED"]


def outposts():
    """Processes that keep a worker."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if (each.info["cmdline"] or [])[1:4] == ["-P", "-m", "rpcbench.worker"]]


def free():
    """CPUs of which Ray has made no use."""
    import ray

    return ray.available_resources().get("CPU", 0.0)
