"""`rpcbench launch --nproc-per-node 4 script.py`: a script as several ranks, with the options of torch.distributed 0.4.

torchrun does the work, in this process. Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT,
which `init_process_group()` reads. Guarantees
- With `--pass-local-rank` each process gets `--local_rank=N` besides, before its own arguments, as scripts of 0.4 want.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from rpcbench.base.errors import RpcError

_PASS = ("--pass-local-rank", "--pass_local_rank")


def run(arguments: Sequence[str]) -> None:
    """Be torchrun. RpcError where no script is named, or there is none."""
    from torch.distributed import run as torchrun

    asked = torchrun.get_args_parser().parse_args([each for each in arguments if each not in _PASS] or ["-h"])
    in_python = not (asked.module or asked.no_python)
    if in_python and not Path(asked.training_script).is_file():
        raise RpcError(f"there is no script {asked.training_script}")
    if {*_PASS} & {*arguments}:
        if not in_python:
            raise RpcError("--pass-local-rank goes with a script in Python; what else you start reads LOCAL_RANK")
        asked.training_script_args = [asked.training_script, *asked.training_script_args]
        asked.training_script, asked.module = __name__, True
    torchrun.run(asked)  # type: ignore[no-untyped-call]


def _main() -> None:
    """In a rank: be the script, with its local rank as an argument."""
    script, *rest = sys.argv[1:]
    sys.argv = [script, f"--local_rank={os.environ['LOCAL_RANK']}", *rest]
    sys.path[0] = str(Path(script).parent.absolute())
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main()
