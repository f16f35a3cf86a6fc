"""Tracebacks for users: without the frames of this package."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import FunctionType

import pytest
from IPython.core.ultratb import FormattedTB

from rpcbench.base.futures import blocked
from rpcbench.cells.tracebacks import of_user
from rpcbench.pipeline.recompute import seeded


def _fails() -> None:
    raise ValueError


def _in_a_context_of_ours() -> None:
    with blocked():
        _fails()


def _as_a_context_of_ours_begins() -> None:
    with seeded("no number"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("deed", "names", "hidden"),
    [
        (_in_a_context_of_ours, ["_in_a_context_of_ours", "_fails"], set()),
        (_as_a_context_of_ours_begins, ["_as_a_context_of_ours_begins"], {"__enter__", "seeded"}),
    ],
)
def test_frames_of_this_package_and_of_its_contexts_are_left_out(
    deed: Callable[[], None], names: list[str], hidden: set[str]
) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        deed()
    whole = [frame.name for frame in traceback.extract_tb(caught.tb)]
    kept = [frame.name for frame in traceback.extract_tb(of_user(caught.tb))]
    assert kept[1:] == names and whole[0] == kept[0]
    assert hidden <= set(whole)


def test_a_frame_without_a_line_number_is_shown_at_its_functions_first_line():
    code = _fails.__code__
    nowhere = bytes([0x80 | 15 << 3 | 7]) * (len(code.co_code) // 16 + 1)  # each entry: eight instructions on no line
    lineless = FunctionType(code.replace(co_linetable=nowhere), globals())
    with pytest.raises(ValueError) as caught:
        lineless()
    assert caught.tb.tb_next is not None and caught.tb.tb_next.tb_lineno in (None, -1)
    kept = of_user(caught.tb)
    assert [line for _, line in traceback.walk_tb(kept)][-1] == code.co_firstlineno
    shown = FormattedTB(mode="Context").structured_traceback(ValueError, caught.value, kept)
    assert any("_fails" in line for line in shown)
