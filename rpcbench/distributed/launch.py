"""`rpcbench launch`, also as `python -m rpcbench.distributed.launch`: starts a script as several ranks, by torchrun.

Guarantees
- Options are torchrun's, and each rank gets the variables that `init_process_group()` reads.
- With `--pass-local-rank` each process gets `--local_rank=N` ahead of its own arguments, as from torch.distributed 0.4.
- A missing script, or an option that does not fit, is an error in one sentence, before any process is started.

As a program with `RANK_OPTION`, this module is one rank of a launch with `--pass-local-rank`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun

from rpcbench.base.errors import RpcError

PASS_OPTIONS = frozenset({"--pass-local-rank", "--pass_local_rank"})
RANK_OPTION = "--run-as-rank"
_INTERRUPTED = 130  # exit status after Ctrl-C: 128 + SIGINT


def launch(arguments: Sequence[str]) -> None:
    """Run torchrun in this process.

    Args:
        arguments: Its options, and `--pass-local-rank`; then the script and its own arguments.

    Raises:
        RpcError: There is no such script, or an option does not fit.
    """
    options = torchrun.get_args_parser().parse_args([each for each in arguments if each not in PASS_OPTIONS] or ["-h"])
    in_python = not (options.module or options.no_python)
    if in_python and not Path(options.training_script).is_file():
        raise RpcError(f"there is no script {options.training_script}")
    if not PASS_OPTIONS.isdisjoint(arguments):
        if not in_python:
            raise RpcError("--pass-local-rank goes with a script in Python; any other program reads LOCAL_RANK")
        # Each rank runs this module, which runs the script: torchrun itself no longer passes `--local_rank`.
        options.training_script_args = [RANK_OPTION, options.training_script, *options.training_script_args]
        options.training_script, options.module = "rpcbench.distributed.launch", True
    torchrun.run(options)  # type: ignore[no-untyped-call]


def run_rank(script: str, arguments: Sequence[str]) -> None:
    """Run the script of a rank, with `--local_rank=N` ahead of its own arguments."""
    sys.argv = [script, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    # As the interpreter does for a script: its folder comes first.
    sys.path[0] = str(Path(script).parent.absolute())
    runpy.run_path(script, run_name="__main__")


def main(arguments: Sequence[str]) -> int:
    """Run a rank or a launch, and return the exit status."""
    if arguments[:1] == [RANK_OPTION]:
        run_rank(arguments[1], arguments[2:])
        return 0
    try:
        launch(arguments)
    except RpcError as error:
        sys.stderr.write(f"rpcbench launch: {error}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
