"""The comparison panel: which values of a parallel program are those of one process, and the first that is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rpcbench.panels.base import Panel
from rpcbench.telemetry.compare_view import compare_view
from rpcbench.telemetry.drawing import panel_script, panel_styles
from rpcbench.telemetry.recording import Still

if TYPE_CHECKING:
    from rpcbench.compare.report import CompareReport

_WITHOUT_CLUSTER = "A report that you have needs no cluster: `display(report)`, or `report` as the last line, shows it."


class ComparePanel(Panel):
    """Modules as rows, phases of a step as columns; see `rpcbench.telemetry.compare_view.compare_view`."""

    look = staticmethod(compare_view)
    sentence = "The last comparison, live while this notebook's kernel runs. Run the cell to see the panel."
    _esm = panel_script("compare")
    _css = panel_styles("compare")

    @classmethod
    def for_current_cluster(cls) -> Self:
        try:
            return super().for_current_cluster()
        except RuntimeError as error:
            raise RuntimeError(f"{error} {_WITHOUT_CLUSTER}") from None


class ReportPanel(ComparePanel):
    """The panel of one report, which stays as it is."""

    def __init__(self, report: CompareReport) -> None:
        from rpcbench.compare.report_rows import report_tables  # here: it loads torch.distributed.tensor

        self._text = str(report)
        member = {"name": "notebook", "id": 0, "incarnation": 0, "state": "up", "left_out": 0}
        super().__init__(Still({0: {**member, "tables": report_tables(report)}}))

    def __repr__(self) -> str:
        return self._text


def display_report(report: CompareReport) -> None:
    """Display a report in a notebook: its panel with its text, and the still picture below."""
    ReportPanel(report)._ipython_display_()
