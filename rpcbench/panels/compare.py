"""The comparison panel: which values of a parallel program are those of one process, and the first that is not."""

from __future__ import annotations

from typing import Self

from rpcbench.panels.base import Panel, Source
from rpcbench.telemetry.collector import RECORD
from rpcbench.telemetry.compare_view import compare_view
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.recording import Still, make_lone_world

_WITHOUT_CLUSTER = "A report that you have needs no cluster: `display(report)`, or `report` as the last line, shows it."


class ComparePanel(Panel):
    """Modules as rows, phases of a step as columns; see `rpcbench.telemetry.compare_view.compare_view`."""

    look = staticmethod(compare_view)
    sentence = "The last comparison, live while this notebook's kernel runs. Run the cell to see the panel."
    wants = '`rpcbench.panel("compare", report)` shows a result of cluster.compare, without `report` the last one'
    _esm = panel_script("compare")
    _css = panel_styles("compare")

    @classmethod
    def for_current_cluster(cls) -> Self:
        try:
            return super().for_current_cluster()
        except RuntimeError as error:
            raise RuntimeError(f"{error} {_WITHOUT_CLUSTER}") from None

    @classmethod
    def find_source(cls, given: object) -> Source:
        # here: these load torch.distributed.tensor
        from rpcbench.compare.report import CompareReport
        from rpcbench.compare.report_rows import report_tables

        if isinstance(given, CompareReport):
            return Still(make_lone_world(report_tables(given)), RECORD, str(given))
        return super().find_source(given)
