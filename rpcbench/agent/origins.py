"""Which cell of the notebook runs on this process's main thread, as its front end calls it."""

from __future__ import annotations

import sys
from typing import Any

from rpcbench.wire.messages import Origin


def notebook_cell() -> Origin | None:
    """On the main thread of a process that IPython runs cells in. None where none runs."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    if parent.get("header", {}).get("msg_type", "execute_request") != "execute_request":
        return None  # a callback of a widget, say
    number = len(shell.history_manager.input_hist_parsed) - 1  # `execution_count` may be the next one's already
    return Origin(str(parent.get("metadata", {}).get("cellId", "")), number)
