"""The command line. Thin: every subcommand delegates to the part of the package that does the work."""

from __future__ import annotations

import sys


def main() -> int:
    """Print the warning about the other distribution `rpcbench`, whose command calls this; ours calls `main.main`."""
    from rpcbench.cli.namesake import WARNING

    print(WARNING, file=sys.stderr)
    return 1
