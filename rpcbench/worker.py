"""`python -m rpcbench.worker`: the entry point of workers that other programs start.

With arguments it supervises a worker that a launcher's command starts on a host (see `launch.supervisor`).
`torchrun … -m rpcbench.worker` makes a world of workers that a notebook joins (see `launch.torchrun_worker`).
"""

from __future__ import annotations

import sys

from rpcbench.base.errors import RpcError
from rpcbench.launch import supervisor


def main() -> int:
    """Run the worker and return the exit status."""
    if arguments := sys.argv[1:]:
        return supervisor.main(arguments)
    from rpcbench.launch import torchrun_worker  # loads torch, which the supervisor must not

    try:
        return torchrun_worker.main()
    except RpcError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
