"""The kernel's status in front ends while a cell runs: busy, whatever other threads of the kernel have just finished.

Rules (for front ends that use subshells, as JupyterLab does)
- ipykernel says "idle" after each message that it handles, also on a subshell or the control thread, such as those of
  panels. Front ends take that for the whole kernel. So "busy" follows each such "idle" as long as the main thread runs
  something; each message still has its own "idle", which front ends wait for.
- After the main thread's "idle" no "busy" of an earlier cell follows.
- A kernel that publishes in another way than ipykernel stays as it is.
"""

# What front ends receive while a cell runs and a panel is opened, with the request that each status is of:
#
#     busy   the cell       JupyterLab: Busy
#     busy   the panel
#     idle   the panel      Idle, although the cell runs; the page waits for this status of its message
#     busy   the cell       Busy: what this module adds, in the same moment
#     idle   the cell       Idle
#
# Two other ways do less. To publish no status for panels would leave the page waiting for each of its messages, as
# JupyterLab keeps what it has sent until it has read that status. And a page can ignore statuses by the type of the
# request (`untracked_message_types`, an option of the server), but comms of panels and of other widgets have the same
# types: a button of a user's own widget, whose callback runs on the main thread for long, would look idle, too.
#
# In front ends without subshells nothing changes: the main thread handles all messages, one after another, and a panel
# waits for the end of the cell.

from __future__ import annotations

import threading
from typing import Any


class CellStatus:
    """Replaces a kernel's `_publish_status` until `restore_kernel`. Made by a cell, on the main thread."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._publish = getattr(kernel, "_publish_status", None)  # kernels of other packages have none
        self._lock = threading.Lock()  # no "busy" between another thread's look and its message; sends only queue
        self._running: Any = None  # the request that the main thread handles
        if self._publish is not None:
            # The cell that makes this runs already: its "busy" was before.
            self._running = kernel.get_parent("shell")
            kernel._publish_status = self.publish_status

    def restore_kernel(self) -> None:
        if self._publish is not None:
            self._kernel._publish_status = self._publish

    def publish_status(self, status: str, channel: str, parent: Any = None) -> None:
        """Publish a status, as the kernel's own function."""
        assert self._publish is not None
        is_main = channel == "shell" and threading.current_thread() is threading.main_thread()
        with self._lock:
            if is_main:
                self._running = (parent or self._kernel.get_parent(channel)) if status == "busy" else None
            self._publish(status, channel, parent)
            if status == "idle" and self._running:
                self._publish("busy", "shell", self._running)
