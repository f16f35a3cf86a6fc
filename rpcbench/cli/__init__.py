"""The command line. Thin: every subcommand delegates to the part of the package that does the work.

Another author's distribution is called `rpcbench`; that of this package is `jupyter-rpcbench`. Both have a package and
a command named `rpcbench`. So the one that is installed later overwrites files of the other, and the removal of one
breaks the other. If the command is ours, it calls `find_conflict`. If it is the other one, it calls `main` here.
"""

from __future__ import annotations

import sys

_COMMAND = "rpcbench.cli.main:main"
_WARNING = (
    "Another author's distribution `rpcbench` is installed, too. It and `jupyter-rpcbench` have a package and a "
    "command of the same name, so each overwrites files of the other. Remove both with "
    "`pip uninstall rpcbench jupyter-rpcbench`, then install `jupyter-rpcbench` again."
)


def find_conflict() -> str | None:
    """Return a warning, with the remedy, if the other distribution is installed here. Import no package."""
    from importlib import metadata  # it takes 20 ms to load

    try:
        other = metadata.distribution("rpcbench")
    except metadata.PackageNotFoundError:
        return None
    is_own = any(point.value == _COMMAND for point in other.entry_points)  # a checkout installed under its earlier name
    return None if is_own else _WARNING


def main() -> int:
    """Print the warning: only the command of the other distribution calls this; ours calls `main.main`."""
    print(_WARNING, file=sys.stderr)
    return 1
