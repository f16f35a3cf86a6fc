"""The processes that a `TorchrunGang` starts: torchrun, which also reports how its ranks ended, and each rank.

    python -m rpcbench.launch.torchrun_entry torchrun DIRECTORY COUNT
    python -m rpcbench.launch.torchrun_entry rank DIRECTORY

Both report to the launcher through a named pipe in DIRECTORY.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4


def run_torchrun(directory: Path, count: str) -> None:
    """Run torchrun with `count` ranks to their end, report their exit statuses, and raise torchrun's errors."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ranks = ["-m", __spec__.name, "rank", str(directory)]
    # torchrun's rendezvous is a file: by default it would listen on all interfaces, and unpickle any peer's data.
    at = [f"--rdzv-endpoint={directory / 'meeting'}", "--rdzv-conf=store_type=file", f"--rdzv-id={uuid4()}"]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    arguments = run.get_args_parser().parse_args(["--rdzv-backend=c10d", *at, "--nproc-per-node", count, *ranks])
    try:
        run.run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        _write_report(directory, {"failed": statuses, "first": error.get_first_failure()[0]})
        raise


def run_rank(directory: Path) -> None:
    """Run the worker of this rank to its end."""
    from rpcbench.launch import worker_bootstrap

    rank = int(os.environ["RANK"])
    path = directory / f"rank{rank}.json"
    request = json.loads(path.read_text())
    path.unlink()  # it holds the secret
    _write_report(directory, {"rank": rank, "pid": os.getpid()})
    worker_bootstrap.run_worker({**request, "parent": os.getppid()})


def _write_report(directory: Path, report: dict[str, Any]) -> None:
    with (directory / "torchrun.pipe").open("a") as pipe:
        pipe.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "rank":
        run_rank(Path(where))
    else:
        run_torchrun(Path(where), *rest)
