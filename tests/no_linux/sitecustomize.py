"""Each Python process that finds this on its path has, of Linux, only what macOS has, too.

`test_no_linux.py` puts this folder on the path of a program. The names below are deleted from Python's modules before
others import them, `pathlib` finds no /proc, and `fcntl` has the F_GETPATH of macOS. For the package `sys.platform`
equals "darwin", for torch and psutil "linux", as they would load other binaries.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

LACKING = {  # module → beginnings of the names that Python has on Linux, and on macOS not, at least not before 3.13
    "select": "EPOLL epoll",  # first: the others import it
    "os": "EFD_ MFD_ PIDFD_ P_PIDFD eventfd memfd_create pidfd_open pipe2 sched_getaffinity waitid",
    "signal": "SIGRTM pidfd_send_signal sigtimedwait sigwaitinfo",
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_SEAL_",
    "mmap": "MADV_HUGEPAGE MADV_REMOVE MAP_POPULATE",
    "resource": "RUSAGE_THREAD prlimit",
    "socket": "MSG_CMSG_CLOEXEC MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED TCP_INFO TCP_USER_TIMEOUT",
    "time": "CLOCK_BOOTTIME",
}
_PACKAGE = f"{os.sep}rpcbench{os.sep}"
_ASKING = ("exists", "is_dir", "is_file")
_F_GETPATH = 50
_fcntl = fcntl.fcntl


class Platform(str):
    """`sys.platform`, which equals "darwin" where the package compares it."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        seen = "darwin" if _PACKAGE in sys._getframe(1).f_code.co_filename else str(self)
        return seen == other

    def __ne__(self, other: object) -> bool:
        seen = "darwin" if _PACKAGE in sys._getframe(1).f_code.co_filename else str(self)
        return seen != other


def _without_proc(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: pathlib.Path, *args: Any, **kwargs: Any) -> Any:
        if not str(self).startswith("/proc/"):
            return method(self, *args, **kwargs)
        if name in _ASKING:
            return False
        raise FileNotFoundError(2, "no /proc on this system", str(self))

    return call


def _get_path(descriptor: int, command: int, argument: Any = 0) -> Any:
    if command != _F_GETPATH:
        return _fcntl(descriptor, command, argument)
    return os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}")).ljust(len(argument), b"\0")


for _module, _beginnings in LACKING.items():
    _found = importlib.import_module(_module)
    for _name in [each for each in dir(_found) if each.startswith(tuple(_beginnings.split()))]:
        delattr(_found, _name)
for _name in (*_ASKING, "open", "read_bytes", "read_text", "readlink", "stat"):
    setattr(pathlib.Path, _name, _without_proc(_name, getattr(pathlib.Path, _name)))
fcntl.fcntl, fcntl.F_GETPATH = _get_path, _F_GETPATH
sys.platform = Platform(sys.platform)
