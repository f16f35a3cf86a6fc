"""`python -m rpcbench.worker worker1`: what a command starts on a host to have a worker there, see `launch.outpost`."""

from __future__ import annotations

import sys

from rpcbench.launch import outpost


def main() -> int:
    """The exit status."""
    return outpost.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
