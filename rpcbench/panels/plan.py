"""The plan panel: the layouts of `rpcbench.plan` as points, memory by step time, and the step of the chosen one."""

from __future__ import annotations

from typing import Self

from rpcbench.launch.plan_layouts import LayoutPlan
from rpcbench.panels.base import Panel, Source
from rpcbench.telemetry.collector import SIMULATED
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.plan_view import plan_tables, plan_view
from rpcbench.telemetry.recording import Still, make_lone_world


class PlanPanel(Panel):
    """Layouts as points; see `rpcbench.telemetry.plan_view.plan_view`. It shows one plan, and follows no cluster."""

    look = staticmethod(plan_view)
    sentence = "The layouts of a plan. Run the cell to see the panel."
    wants = '`rpcbench.panel("plan", plan)` and `%panel plan NAME` show the result of rpcbench.plan'
    _esm = panel_script("plan")
    _css = panel_styles("plan")

    @classmethod
    def for_current_cluster(cls) -> Self:
        """Raise TypeError: a cluster has no plan."""
        raise TypeError(f"a cluster has no plan to show: {cls.wants}")

    @classmethod
    def find_source(cls, given: object) -> Source:
        if not isinstance(given, LayoutPlan):
            raise cls.make_refusal(given)
        return Still(make_lone_world(plan_tables(given)), SIMULATED, str(given))
