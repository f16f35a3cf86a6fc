"""`python -m rpcbench.worker`: what others start to have a worker.

With a name it is what a command starts on a host (see `launch.supervisor`); `torchrun … -m rpcbench.worker` makes a
world of workers that a notebook joins (see `launch.torchrun_worker`).
"""

from __future__ import annotations

import sys

from rpcbench.base.errors import RpcError
from rpcbench.launch import supervisor


def main() -> int:
    """The exit status."""
    if arguments := sys.argv[1:]:
        return supervisor.main(arguments)
    from rpcbench.launch import torchrun_worker  # loads torch, as an outpost must not

    try:
        return torchrun_worker.main()
    except RpcError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
