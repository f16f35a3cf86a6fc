"""The messages panel: a sequence diagram of every message between members, and of what they do together."""

from __future__ import annotations

from typing import Self

from rpcbench.panels.base import Panel, asset
from rpcbench.telemetry import collector
from rpcbench.telemetry.collector import Traced
from rpcbench.telemetry.message_views import messages_view


class MessagesPanel(Panel):
    """A lifeline per member, an arrow per message, dots per collective; see `telemetry.message_views.messages_view`.

    Members tell of every message only while such a panel, or a `%%trace`, is open.
    """

    look = staticmethod(messages_view)
    sentence = "Messages between members, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = asset("messages", ".js", "meetings")
    _css = asset("messages", ".css")

    @classmethod
    def live(cls) -> Self:
        """A panel of the current cluster, all members of which tell of their messages as long as it is open."""
        return cls(Traced(collector.current_collector()))
