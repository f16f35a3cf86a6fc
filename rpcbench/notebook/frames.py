"""Errors of calls in a notebook, shown as far as the user's code: what is below that is the machinery here.

So are errors that a worker raised, those that say themselves what is wrong (RpcError, PipelineError, NamesError), and
Ctrl-C; and what they came of. Any other error that is raised in here shows where.
"""

from __future__ import annotations

import sys
from typing import Any

from rpcbench.base.errors import NamesError, PipelineError, RemoteError, RpcError
from rpcbench.launch.tracebacks import of_user


class Frames:
    """Stands before `shell.showtraceback` until it is given back."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._before = shell.showtraceback
        shell.showtraceback = self._show

    def give_back(self) -> None:
        self._shell.showtraceback = self._before

    def _show(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        kind, error, frames = exc_tuple or sys.exc_info()
        from_worker = isinstance(getattr(error, "__cause__", None), RemoteError)
        if from_worker or isinstance(error, RpcError | PipelineError | NamesError | KeyboardInterrupt):
            exc_tuple = kind, error, of_user(frames)
            while (error := getattr(error, "__cause__", None)) is not None:
                error.__traceback__ = of_user(error.__traceback__)
        self._before(exc_tuple, *args, **kwargs)
