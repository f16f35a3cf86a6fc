"""`rpcbench launch` runs the real torchrun, with the options of torch.distributed 0.4."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import addresses
import pytest

from rpcbench.cli.main import main

SCRIPT = """
import sys, torch, rpcbench.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(total := torch.tensor([10.0 ** dist.get_rank()]))
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("gloo")
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g} {sys.argv[1:]}\\n")
dist.barrier()
"""


@pytest.mark.process
@pytest.mark.parametrize(("option", "passed"), [
    pytest.param((), [], marks=pytest.mark.long), (("--pass-local-rank",), ["--local_rank={}"]),
])  # fmt: skip
def test_launch_runs_a_script_on_each_rank_with_its_arguments(
    tmp_path: Path, option: tuple[str, ...], passed: list[str]
) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-c", "from rpcbench.cli.main import main; raise SystemExit(main())", "launch", *option]
    command += ["--nproc_per_node", "2"]
    with addresses.port() as port:
        command += [f"--master_port={port}", str(script), "--epochs", "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    wanted = [[*(each.format(rank) for each in passed), "--epochs", "3"] for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2: 11 {wanted[rank]}" for rank in range(2)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc-per-node=2", "--standalone", "gone.py"], "there is no script gone.py"),
        (["--pass-local-rank", "-m", "json"], "--pass-local-rank goes with a script in Python"),
    ],
)
def test_launch_refuses_a_missing_script_and_an_unsuitable_option(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["launch", *arguments]) == 1
    assert f"rpcbench launch: {words}" in capsys.readouterr().err
