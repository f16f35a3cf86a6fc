"""Workers that the real srun starts: steps on one node in an allocation, and jobs without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from far_commands import PAGE, line_with
from launch_bench import until
from netlab import connected
from slurm_here import CPUS, Slurm, skip_unless_installed, slurm
from typed_notebook import ADD_UP, Notebook, typed_notebook

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.slurm]

START = '%cluster start {n} --launcher command {options} template="srun {srun} {{cmd}}"'
BLOCK = re.search(r"^template = \"srun .*\n.*$", PAGE, re.MULTILINE)
PATIENCE = 4  # seconds, for a start that is to be too late


def start(n: int, srun: str, options: str = "") -> str:
    hosts = " hosts=node1" if "{host}" in srun else ""
    return f"{START.format(n=n, srun=srun, options=options)}{hosts}"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    skip_unless_installed()
    with connected(2) as (host, node), slurm(host, node, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def allocated(here: Slurm) -> Iterator[Notebook]:
    """A notebook in an allocation of half of the node."""
    with typed_notebook((*here.host.entry, "salloc", "-N1", f"-n{CPUS // 2}"), here.env) as notebook:
        yield notebook
    until(lambda: not here.jobs())


@pytest.fixture(scope="module")
def three(allocated: Notebook) -> Notebook:
    """Three workers on the node, for tests that leave them."""
    assert BLOCK is not None
    allocated.run(f"import rpcbench\n{re.sub('node[23]', 'node1', BLOCK[0])}")
    return allocated


@pytest.fixture(scope="module")
def outside(here: Slurm) -> Iterator[Notebook]:
    """A notebook without an allocation."""
    with typed_notebook(here.host.entry, here.env) as notebook:
        yield notebook


# -- in an allocation
def test_three_workers_share_a_node_and_compute_together(here: Slurm, three: Notebook) -> None:
    assert len(here.steps()) == 3
    assert three.run(ADD_UP).count("sum 6.0") == 3


def test_a_step_that_slurm_cancels_during_a_cell_is_reported(here: Slurm, three: Notebook, tmp_path: Path) -> None:
    runs, steps = tmp_path / "runs", {*here.steps()}
    three.run("%cluster restart worker2")
    (step,) = {*here.steps()} - steps
    three.begin(f"%%remote worker2\nopen({str(runs)!r}, 'x')\nimport time\ntime.sleep(600)")
    until(runs.exists)
    here.lines("scancel", step)
    _, error = three.answer()
    assert error.startswith("WorkerLostError: worker2 was lost"), error
    assert re.search(rf"STEP {step} ON node1 CANCELLED", error), error
    three.run("%cluster restart worker2")
    assert three.run(ADD_UP).count("sum 6.0") == 3


def test_stop_leaves_no_step(here: Slurm, three: Notebook) -> None:
    assert here.steps() and here.others()
    three.run("%cluster stop")
    until(lambda: not here.steps())
    until(lambda: not here.others())


def test_a_start_without_overlap_is_told_of_it(here: Slurm, allocated: Notebook) -> None:
    error = allocated.error_of(start(3, "-w {host} -N1 -n1", f"--patience {PATIENCE}"))
    assert f"timed out after {PATIENCE} s waiting for" in error and "srun --overlap shares it" in error
    assert re.search(r"worker\d on node1, .*: its command still runs, srun -w node1 -N1 -n1 .* worker\d; it has", error)
    until(lambda: not here.steps())


def test_a_login_shell_starts_a_worker(here: Slurm, allocated: Notebook) -> None:
    allocated.run(line_with("srun", "bash -lc").replace("{cmd}", "export LOGIN=$(shopt login_shell); {cmd}"))
    assert re.search(r"login_shell\s+on", allocated.run("%%remote worker1\nimport os\nprint(os.environ['LOGIN'])"))
    allocated.run("%cluster stop")
    until(lambda: not here.steps())


# -- without an allocation
def test_each_worker_may_be_a_job_of_its_own(here: Slurm, outside: Notebook) -> None:
    before = here.jobs()
    outside.run(line_with("srun", "--patience"))
    assert len(here.jobs() - before) == 2
    assert outside.run(ADD_UP).count("sum 3.0") == 2
    outside.run("%cluster stop")
    until(lambda: here.jobs() == before)


def test_patience_that_runs_out_withdraws_the_request(here: Slurm, allocated: Notebook, outside: Notebook) -> None:
    before = here.jobs()
    error = outside.error_of(start(1, f"-N1 -n1 -c{CPUS}", f"--patience {PATIENCE}"))
    assert re.match(rf"RpcError: timed out after {PATIENCE} s waiting for worker1 to join\n", error)
    assert "queued and waiting for resources" in error and f"srun -N1 -n1 -c{CPUS}" in error
    until(lambda: here.jobs() == before)
    assert before and not here.others()


def test_the_end_of_an_allocation_is_reported(here: Slurm, outside: Notebook) -> None:
    outside.run(start(1, "-N1 -n1"))
    (job,) = {step.partition(".")[0] for step in here.steps()}
    outside.begin("%%remote worker1\nimport time\ntime.sleep(600)")
    here.lines("scancel", job)
    _, error = outside.answer()
    assert "WorkerLostError: worker1 was lost" in error and "CANCELLED" in error, error
    outside.run("%cluster stop")
    until(lambda: not here.others())
