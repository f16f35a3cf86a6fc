"""The environment of workers: their variables, their interpreter, and the packages that they have.

Guarantees
- A mistake in a variable or an interpreter is a ValueError of one sentence, before any worker starts. For this an
  interpreter is run once, without torch.
- Workers of another interpreter have its packages: of this process's import path they get the entries that belong to no
  Python, such as the folder of the notebook.
- Versions of packages that differ between workers and this process are a risk, not an error: one sentence tells them.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import site
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rpcbench.base.config import PROTOCOL, RANK_NAMES, STORE_PORT, VISIBLE_GPUS

_OURS = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", RANK_NAMES, STORE_PORT,
}  # fmt: skip
"""Variables that a cluster sets on its workers (`launch.ranks`)."""


def worker_environment(env: Mapping[str, Any] | None, pins: bool = False) -> dict[str, str]:
    """Return the variables of workers as texts. ValueError for a name or value that is none, or that the cluster sets.
    `pins`: the cluster assigns GPUs."""
    made = {}
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"env: {name!r} is not the name of a variable")
        if isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
            raise ValueError(f"env: the value of {name} has to be a text, not {value!r}")
        if name in _OURS:
            raise ValueError(f"env: the cluster itself sets {name} on its workers; leave it out")
        if name == VISIBLE_GPUS and pins:
            raise ValueError(f"env: the cluster sets {name}; choose GPUs by gpus=[0, 1], in a notebook --gpus 0,1")
        made[name] = str(value)
    return made


def warn_of_debugging(given: Mapping[str, str]) -> None:
    """Warn where workers get a variable, of those `given` or of this process, with which torch ends them."""
    if {**os.environ, **given}.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        warnings.warn(
            "TORCH_DISTRIBUTED_DEBUG is DETAIL: with it torch's DistributedDataParallel ends a worker by SIGSEGV where "
            "the backend is gloo. Set it to INFO or OFF before the cluster starts",
            RuntimeWarning,
            stacklevel=3,
        )


# -- interpreters
def is_installed(entry: str) -> bool:
    """Return whether an entry of the import path belongs to this Python: another one has its own."""
    directories = sys.prefix, sys.base_prefix, site.getusersitepackages()
    return any(Path(entry).is_relative_to(directory) for directory in directories if entry)


class Interpreter(NamedTuple):
    """A Python of this host that runs workers."""

    executable: str = sys.executable
    own: tuple[str, ...] = ()  # its import path; empty: it is the one that runs this process

    def import_path(self) -> list[str]:
        """Return the import path of workers that start now: that of this process, as far as it suits."""
        here = [entry for entry in sys.path if isinstance(entry, str)]  # JSON cannot hold other entries
        if not self.own:
            return here
        ours = [entry for entry in here if not is_installed(entry)]
        return [*ours, *(entry for entry in self.own if entry not in ours)]


_NEEDED = ("rpcbench", "torch", "numpy", "cloudpickle", "msgspec", "psutil", "cryptography", "IPython")
_PROBE_SECONDS = 30.0
# Run by any Python, which reports on one line; the arguments are the part of this process's import path.
_PROBE = """\
import json, sys
own = [entry for entry in sys.path if entry]
told = {"python": sys.version.split()[0], "own": own, "protocol": None, "missing": []}
if list(sys.version_info[:2]) == VERSION:
    import importlib.util
    sys.path[:] = sys.argv[1:] + [entry for entry in own if entry not in sys.argv[1:]]
    told["missing"] = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if "rpcbench" not in told["missing"]:
        from rpcbench.base.config import PROTOCOL
        told["protocol"] = PROTOCOL
print(json.dumps(told))
"""


def find_interpreter(python: str | None, more: Sequence[str] = ()) -> Interpreter:
    """Return the interpreter of that path or name; without one, this process's own.

    Args:
        python: As a shell would find it; "~" is the user's home.
        more: Packages that it needs beside those of every worker.

    Raises:
        ValueError: It is no Python of this minor version that has these packages.
    """
    if python is None:
        return Interpreter()
    found = _find_executable(python)
    if found == sys.executable:
        return Interpreter()
    ours = [entry for entry in Interpreter().import_path() if not is_installed(entry)]
    report = _probe_interpreter(python, found, [*_NEEDED, *more], ours)
    if report["python"].split(".")[:2] != platform.python_version().split(".")[:2]:
        raise ValueError(
            f"python={python!r} is Python {report['python']}, and this process runs {platform.python_version()}: "
            "functions travel only between Pythons of one minor version"
        )
    if report["missing"]:
        raise ValueError(
            f"python={python!r} has no {', '.join(report['missing'])}: install the same rpcbench "
            "there, with the packages that it needs"
        )
    if report["protocol"] != PROTOCOL:
        raise ValueError(f"python={python!r} has another version of rpcbench than this process: install the same there")
    return Interpreter(found, tuple(report["own"]))


def _find_executable(python: str) -> str:
    path = os.path.expanduser(python)  # noqa: PTH111  (pathlib would drop a leading "./", which `which` needs)
    if Path(path).is_dir():
        raise ValueError(f"python={python!r} is a folder; name the interpreter in it: {Path(path, 'bin', 'python')}")
    found = shutil.which(path)
    if found is None:
        raise ValueError(f"python={python!r} is no program here; name an interpreter, such as /path/of/venv/bin/python")
    return os.path.abspath(found)  # noqa: PTH100  (a link of a venv must not be followed)


def _probe_interpreter(python: str, found: str, needed: Sequence[str], ours: Sequence[str]) -> dict[str, Any]:
    version = [int(part) for part in platform.python_version_tuple()[:2]]
    probe = _PROBE.replace("VERSION", str(version)).replace("NEEDED", repr([*needed]))
    command = [found, "-c", probe, *ours]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_SECONDS)
        report = json.loads(done.stdout)
        return {key: report[key] for key in ("python", "own", "protocol", "missing")}
    except OSError as error:
        why = str(error.strerror)
    except subprocess.TimeoutExpired:
        why = f"it did not report its version in {_PROBE_SECONDS:g} s"
    except (ValueError, TypeError, KeyError):
        why = (done.stderr.strip().splitlines() or ["it did not report its version"])[-1]
    raise ValueError(f"python={python!r} does not run as a Python interpreter: {why}")


# -- packages
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that data between this process and others depends on."""
    import cloudpickle  # these four here, as a supervisor loads this module
    import numpy
    import torch

    modules = {"torch": torch, "numpy": numpy, "cloudpickle": cloudpickle}
    return {"Python": platform.python_version(), **{name: str(module.__version__) for name, module in modules.items()}}


def warn_of_differences(there: Mapping[str, Mapping[str, str] | None], but: Sequence[str] = ()) -> None:
    """Warn, in one line, of versions of workers that differ from those here. `but`: packages that others report."""
    here = {name: version for name, version in versions().items() if name not in but}
    if sentence := version_differences(here, {worker: found for worker, found in there.items() if found is not None}):
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)


def version_differences(here: Mapping[str, str], there: Mapping[str, Mapping[str, str]]) -> str:
    """Return a sentence on the versions of workers, by name in `there`, that differ from those `here`; empty if none
    do."""
    groups: dict[tuple[str, ...], list[str]] = {}  # differing versions → the workers that have them
    for worker, found in there.items():
        different = tuple(f"{name} {found[name]}" for name in here if name in found and found[name] != here[name])
        if different:
            groups.setdefault(different, []).append(worker)
    if not groups:
        return ""
    names = _in_order(here, [each for different in groups for each in different])
    clauses = [
        f"{', '.join(workers)} {'has' if len(workers) == 1 else 'have'} {' and '.join(different)}"
        for different, workers in groups.items()
    ]
    ours = " and ".join(f"{name} {here[name]}" for name in names)
    return f"{'; '.join(clauses)}; this process has {ours}: what one side sends, the other may not be able to read"


def _in_order(here: Mapping[str, str], different: Iterable[str]) -> list[str]:
    named = {each.split(" ")[0] for each in different}
    return [name for name in here if name in named]
