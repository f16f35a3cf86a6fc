"""The messages panel: a sequence diagram of all messages and collectives between members."""

from __future__ import annotations

from typing import Self

from rpcbench.panels.base import Panel, Source, find_simulated
from rpcbench.runtime.current import current_agent
from rpcbench.telemetry.attached_job import AttachedJob
from rpcbench.telemetry.collector import LIVE, RECORD, TracedCollector
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.last_trace import LastTrace
from rpcbench.telemetry.message_views import messages_view
from rpcbench.telemetry.profile import Profile
from rpcbench.telemetry.recording import Still
from rpcbench.telemetry.simulated_members import message_members
from rpcbench.telemetry.trace import CollectiveTimeline


class MessagesPanel(Panel):
    """A lifeline per member, an arrow per message, dots per collective; see `telemetry.message_views.messages_view`.

    Members report each message only while such a panel, or a `%%trace`, is open, and some seconds longer: its page may
    be loaded again."""

    look = staticmethod(messages_view)
    sentence = "Messages between members, live while this notebook's kernel runs. Run the cell to see the panel."
    wants = '`rpcbench.panel("messages", world)` shows a result of rpcbench.simulate, without it the current cluster'
    _esm = panel_script("messages")
    _css = panel_styles("messages")

    @classmethod
    def find_source(cls, given: object) -> Source:
        if isinstance(given, AttachedJob):
            given = given.collectives()
        if isinstance(given, Profile):
            return Still(given.world, RECORD)
        if isinstance(given, CollectiveTimeline) and given.world is not None:
            return Still(given.world, RECORD)
        return find_simulated(given, message_members) or super().find_source(given)

    @classmethod
    def for_current_cluster(cls) -> Self:
        """Make a panel of the current cluster. All its members report their messages as long as it is open."""
        return cls(current_agent().part(LastTrace).source())

    def browsers_left(self) -> None:
        if isinstance(self._source, TracedCollector) and self._source.phase == LIVE:
            self._source.agent.part(LastTrace).keep(self._source)
