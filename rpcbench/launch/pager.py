"""`obj?` in a cell on a worker: what IPython would page is shown where a local cell's `obj?` shows it.

In a notebook that is its pager, which comes with the end of the cell. So a cell beside the notebook, and one that runs
on several workers, shows it among its output instead.
"""

from __future__ import annotations

import json
from typing import Any

from rpcbench.launch.outbox import Outbox

_BEFORE_ALL_OTHERS = 10


def install(shell: Any, outbox: Outbox) -> None:
    """On a worker: what `shell` pages while a cell runs goes to the member that asked for the cell."""
    from IPython.core.error import TryNext

    def show_in_pager(_shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
        bundle = {"data": data if isinstance(data, dict) else {"text/plain": data}, "metadata": {}}
        if not outbox.show("page", json.dumps(bundle)):
            raise TryNext

    shell.set_hook("show_in_pager", show_in_pager, _BEFORE_ALL_OTHERS)


def show(content: str) -> bool:
    """In the notebook: show it in the pager. False where there is none."""
    from IPython.core import page
    from IPython.core.getipython import get_ipython

    if not hasattr(get_ipython(), "kernel"):
        return False
    page.page(json.loads(content)["data"])
    return True
