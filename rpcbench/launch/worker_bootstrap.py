"""Turns a new process into a worker: forked by the fork server, or run as a script with its request on standard input.

Guarantees
- The process has its own session and log, the directory, environment and import path of the request, and its own random
  numbers; SIGINT is ignored until the entry sets a handler.
- It ends with its parent (Linux), and as soon as its entry returns: `atexit` functions run, threads are not awaited.
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

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def run_worker(request: Request) -> NoReturn:
    """Run the worker that `request` describes, to its end."""
    exit_process(_run_entry(request))


def exit_process(status: int) -> NoReturn:
    """End this process: `atexit` functions run, threads are not awaited."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    # Without the interpreter's cleanup: it takes half a second with torch, and would copy the pages that forks share.
    os._exit(status)


def _run_entry(request: Request) -> int:
    try:
        _detach_process(request)
        _adopt_environment(request)
        configure_torch(request["environ"])
        from rpcbench.base.config import WorldConfig

        module, _, function = request["entry"].partition(":")
        getattr(importlib.import_module(module), function)(WorldConfig.from_json(request["config"]))
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException:  # noqa: BLE001  (any error that ends a worker belongs in its log)
        traceback.print_exc()
        return 1
    return 0


def _detach_process(request: Request) -> None:
    """Give this process its own session and output, and have it end with its parent."""
    if os.getsid(0) != os.getpid():  # else torchrun has given it a session, and `setsid` would fail
        os.setsid()
    end_with_parent(request["parent"], signal.SIGKILL)
    _redirect_descriptor(0, os.devnull, os.O_RDONLY)
    if request["log"] is not None:  # else it shares the output of its supervisor
        _redirect_descriptor(1, request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(1, 2)
    faulthandler.enable()


def end_with_parent(parent: int, by: int) -> None:
    """Have the system send signal `by` to this process when process `parent` ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # it ended before `prctl`, so no signal will come
            os._exit(1)


def _adopt_environment(request: Request) -> None:
    """Take the notebook's environment, directory and import path, and an empty `__main__`."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["environ"])
    time.tzset()  # TZ may be another one
    os.chdir(request["cwd"])
    sys.path[:] = request["sys_path"]
    sys.path_importer_cache.clear()
    sys.argv[:] = [""]
    sys.modules["__main__"] = types.ModuleType("__main__")
    gc.enable()  # the fork server has disabled it


def configure_torch(environ: Mapping[str, str]) -> None:
    """Set the number of torch's threads, and seed numpy and torch anew."""
    import numpy
    import torch

    # Seeds: siblings were forked with the same state. The module `random` seeds itself after a fork.
    thread_count = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    torch.set_num_threads(max(1, int(thread_count)) if thread_count.isdecimal() else 1)
    numpy.random.seed()
    torch.seed()


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)  # noqa: T201  (as Python does for `sys.exit("text")`)
    return 1


def _redirect_descriptor(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)


if __name__ == "__main__":
    run_worker(json.load(sys.stdin))
