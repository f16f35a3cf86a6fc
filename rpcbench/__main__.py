"""`python -m rpcbench` is the command `rpcbench`, for where that is not on the PATH."""

from __future__ import annotations

import sys

from rpcbench.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
