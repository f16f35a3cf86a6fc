"""Commands that start workers on "hosts": fakes of srun, ssh, kubectl and docker, for this host or namespaces; and the
page that describes the real ones.

Like the real ones, they pass standard input, output and the exit status on, and start the given program in a session of
its own: the end of the command alone does not end the program. ssh joins its words, and a shell splits them again.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "past-one-machine.md").read_text()
LINES = re.findall(r"^%cluster start (?:.*\\\n)*.*$", PAGE, re.MULTILINE)
"""The lines that start workers there."""

LOCAL = "env RPCBENCH_HOST_ID=$host"
"""Another host, as far as a worker can tell."""
NAMESPACE = "ip netns exec $host"

_OPTIONS = {
    "srun": 'while [ "$1" != "${1#-}" ]; do case "$1" in -w) host=$2; shift 2;; *) shift;; esac; done',
    "docker": '[ "$1 $2" = "exec -i" ] || exit 64; host=$3; shift 3',
    "ssh": 'while [ "$1" != "${1#-}" ]; do [ "$1" != -R ] || shift; shift; done; host=$1; shift; set -- sh -c "$*"',
    "kubectl": '[ "$1 $2" = "exec -i" ] || exit 64; host=$3; shift 3; [ "$1" = -- ] && shift',
}
_SCRIPT = """#!/bin/sh
host={first}
{options}
case " {hosts} " in
  *" $host "*) ;;
  *) echo "{name}: error: Unable to reach $host: no such node" >&2; exit 1;;
esac
exec setsid --wait {way} "$@"
"""


def line_with(*words: str) -> str:
    """The only line of the page that has all of these words."""
    (found,) = [line for line in LINES if all(word in line for word in words)]
    return found


def provide(folder: Path, setenv: Callable[[str, str], object], hosts: Iterable[str], way: str = LOCAL) -> None:
    """Put the commands for these hosts first on PATH, with a python3 that runs this interpreter."""
    names, python = [*hosts], folder / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for name, options in _OPTIONS.items():
        path = folder / name
        path.write_text(_SCRIPT.format(name=name, options=options, first=names[0], hosts=" ".join(names), way=way))
        path.chmod(0o755)
    setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
