"""A cluster with workers that a command starts on three hosts, which are network namespaces: a lesson, a cut cable, and
ends that leave no process on any host."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from far_commands import NAMESPACE, provide
from launch_bench import until
from netlab import Host, lab

__all__ = ["lab"]
pytestmark = pytest.mark.process

HERE = Path(__file__).parent
LOST_SECONDS = 4.0
LESSON = HERE.parents[1] / "notebooks" / "00_pipeline_digits.ipynb"


@pytest.fixture
def others(lab: list[Host], no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the hosts that srun knows; at the end none of them has a process left."""
    _, *hosts = lab
    names = [host.name for host in hosts]
    provide(tmp_path, monkeypatch.setenv, names, NAMESPACE)
    yield names
    until(lambda: not any(host.processes() for host in hosts))


@pytest.mark.long
def test_a_lesson_trains_its_pipeline_on_three_hosts(lab: list[Host], others: list[str]) -> None:
    lesson = lab[0].start(HERE / "far_lesson.py", str(LESSON), *others, env={"OMP_NUM_THREADS": "1"})
    said, complaints = lesson.communicate(timeout=170)
    assert lesson.returncode == 0, complaints
    assert "right on at least 95 % of the test images" in said
    assert "3 workers: worker1, worker2, worker3." in said
    assert "3 hosts" in said


def facts(notebook: subprocess.Popen[str]) -> dict[str, Any]:
    assert notebook.stdout is not None and notebook.stderr is not None
    line = notebook.stdout.readline()
    assert line, notebook.stderr.read()
    told: dict[str, Any] = json.loads(line)
    return told


@pytest.fixture
def notebook(lab: list[Host], others: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A notebook that waits for a call to worker2."""
    with lab[0].start(HERE / "far_notebook.py", *others, env={"OMP_NUM_THREADS": "1"}) as process:
        try:
            assert facts(process)["up"].keys() == {"worker1", "worker2", "worker3"}
            yield process
        finally:
            process.kill()


@pytest.mark.long
def test_a_cut_cable_is_reported_with_the_workers_name_and_ends_the_worker(
    lab: list[Host], notebook: subprocess.Popen[str]
) -> None:
    assert notebook.stdin is not None
    cut, begin = lab[2], time.monotonic()
    cut.cut()
    told = facts(notebook)
    assert told["lost"].startswith("worker2 was lost before sleep had finished: nothing was received from it for 4.")
    assert told["states"]["worker2"].startswith("nothing was received from it") and told["left"] == [
        "worker1",
        "worker3",
    ]
    until(lambda: not cut.processes(), 5 * LOST_SECONDS)
    print(f"told after {told['at'] - begin:.2f} s, worker gone after {time.monotonic() - begin:.2f} s")
    assert told["at"] - begin < 5 * LOST_SECONDS
    cut.ip("link", "set", "e0", "up")
    for line in ("cluster.restart('worker2')", "cluster.run('all', '1 + 1')"):
        notebook.stdin.write(f"{line}\n")
        notebook.stdin.flush()
        answer = facts(notebook)
    assert answer["did"] == repr({"worker1": 2, "worker2": 2, "worker3": 2}) and cut.processes()
    notebook.stdin.close()
    assert facts(notebook)["over"]


@pytest.mark.long
def test_a_killed_notebook_ends_the_workers_on_all_hosts(lab: list[Host], notebook: subprocess.Popen[str]) -> None:
    assert all(host.processes() for host in lab)
    notebook.kill()
    until(lambda: not any(host.processes() for host in lab))
