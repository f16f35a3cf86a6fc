"""How a new process becomes a worker: forked by the starter, or run as a script with its request on standard input.

Guarantees
- It has its own session and log, the caller's directory, environment and import path, and random numbers that no
  sibling draws; SIGINT is ignored until the entry sets a handler.
- It ends with its starter (Linux), and as soon as its entry returns: `atexit` functions run, threads are not awaited.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Mapping
from typing import Any, NoReturn

Request = dict[str, Any]

_PR_SET_PDEATHSIG = 1


def run(request: Request) -> NoReturn:
    """Be the worker that `request` describes, to its end."""
    leave(_work(request))


def leave(status: int) -> NoReturn:
    """End this process: `atexit` functions run, threads are not awaited."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # The interpreter is not tidied up: that takes half a second with torch, and would copy the pages that forks share.
    os._exit(status)


def _work(request: Request) -> int:
    """Run the entry; the exit status."""
    try:
        _separate(request)
        _move_in(request)
        settle_torch(request["environ"])
        from rpcbench.base.config import WorldConfig

        module, _, function = request["entry"].partition(":")
        getattr(importlib.import_module(module), function)(WorldConfig.from_json(request["config"]))
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException:  # noqa: BLE001  (whatever ends a worker belongs in its log)
        traceback.print_exc()
        return 1
    return 0


def _separate(request: Request) -> None:
    """A session, output and death of its own."""
    if os.getsid(0) != os.getpid():  # torchrun has given it one
        os.setsid()
    end_with(request["starter"], signal.SIGKILL)
    _point(0, os.devnull, os.O_RDONLY)
    if request["log"] is not None:  # else its output goes where its starter's does
        _point(1, request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(1, 2)
    faulthandler.enable()


def end_with(parent: int, by: int) -> None:
    """This process ends, by that signal, when its parent does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os._exit(1)


def _move_in(request: Request) -> None:
    """Where the notebook is, with what the notebook has; and a `__main__` that is not this file."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["environ"])
    time.tzset()
    os.chdir(request["cwd"])
    sys.path[:] = request["sys_path"]
    sys.path_importer_cache.clear()
    sys.argv[:] = [""]
    sys.modules["__main__"] = types.ModuleType("__main__")
    gc.enable()


def settle_torch(environ: Mapping[str, str]) -> None:
    """Threads as the caller wants them, and random numbers that no sibling draws (`random` sees to itself)."""
    import numpy
    import torch

    asked = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    torch.set_num_threads(max(1, int(asked)) if asked.isdecimal() else 1)
    numpy.random.seed()
    torch.seed()


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)  # noqa: T201  (what Python does with `sys.exit("text")`)
    return 1


def _point(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)


if __name__ == "__main__":
    run(json.load(sys.stdin))
