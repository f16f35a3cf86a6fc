"""The kernel's status while a cell runs: other threads that finish a message do not make it idle."""

from __future__ import annotations

import threading

import pytest

from rpcbench.notebook.cell_status import CellStatus


class Kernel:
    """It publishes like ipykernel, with the request of the thread."""

    def __init__(self):
        self.published = []
        self.local = threading.local()

    def get_parent(self, channel):
        return getattr(self.local, "parent", None)

    def _publish_status(self, status, channel, parent=None):
        self.published.append((status, parent or self.get_parent(channel)))

    def handle(self, parent, channel="shell"):
        self.local.parent = parent
        self._publish_status("busy", channel)
        self._publish_status("idle", channel)

    def handle_elsewhere(self, parent, channel="shell"):
        thread = threading.Thread(target=self.handle, args=[parent, channel])
        thread.start()
        thread.join()


@pytest.fixture
def kernel():
    return Kernel()


@pytest.mark.parametrize("channel", ["shell", "control"])
def test_a_kernel_is_busy_until_its_cell_ends(kernel, channel):
    kernel.local.parent = "load"
    status = CellStatus(kernel)
    kernel.handle_elsewhere("panel", channel)
    assert kernel.published == [("busy", "panel"), ("idle", "panel"), ("busy", "load")]
    kernel._publish_status("idle", "shell")  # the cell has ended
    kernel.published.clear()
    kernel.handle_elsewhere("panel", channel)
    assert kernel.published == [("busy", "panel"), ("idle", "panel")]
    kernel.handle("cell")
    assert kernel.published[2:] == [("busy", "cell"), ("idle", "cell")]

    kernel._publish_status("busy", "shell", "later cell")
    kernel.handle_elsewhere("panel", channel)
    assert kernel.published[-1] == ("busy", "later cell")
    status.restore_kernel()
    kernel.handle_elsewhere("panel", channel)
    assert kernel.published[-1] == ("idle", "panel")


def test_a_kernel_that_publishes_otherwise_stays_as_it_is():
    CellStatus(object()).restore_kernel()
