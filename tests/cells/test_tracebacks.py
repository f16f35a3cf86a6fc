"""Tracebacks for users: without the frames of this package."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.ultratb import FormattedTB
from torch import nn

from rpcbench.base.errors import WorkerLostError
from rpcbench.base.futures import release_slot
from rpcbench.cells.shell import CellShell
from rpcbench.cells.tracebacks import Failed, combined_error, fold_causes, fold_torch, limit_colours, user_frames
from rpcbench.pipeline.recompute import seeded_rng


def _fails() -> None:
    raise ValueError


def _in_a_context_of_ours() -> None:
    with release_slot():
        _fails()


def _as_a_context_of_ours_begins() -> None:
    with seeded_rng("no number"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("deed", "names", "hidden"),
    [
        (_in_a_context_of_ours, ["_in_a_context_of_ours", "_fails"], set()),
        (_as_a_context_of_ours_begins, ["_as_a_context_of_ours_begins"], {"__enter__", "seeded_rng"}),
    ],
)
def test_frames_of_this_package_and_of_its_contexts_are_left_out(
    deed: Callable[[], None], names: list[str], hidden: set[str]
) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        deed()
    whole = [frame.name for frame in traceback.extract_tb(caught.tb)]
    kept = [frame.name for frame in traceback.extract_tb(user_frames(caught.tb))]
    assert kept[1:] == names and whole[0] == kept[0]
    assert hidden <= set(whole)


def test_a_frame_without_a_line_number_is_shown_at_its_functions_first_line():
    code = _fails.__code__
    nowhere = bytes([0x80 | 15 << 3 | 7]) * (len(code.co_code) // 16 + 1)  # each entry: eight instructions on no line
    lineless = FunctionType(code.replace(co_linetable=nowhere), globals())
    with pytest.raises(ValueError) as caught:
        lineless()
    assert caught.tb.tb_next is not None and caught.tb.tb_next.tb_lineno in (None, -1)
    kept = user_frames(caught.tb)
    assert [line for _, line in traceback.walk_tb(kept)][-1] == code.co_firstlineno
    shown = FormattedTB(mode="Context").structured_traceback(ValueError, caught.value, kept)
    assert any("_fails" in line for line in shown)


def coloured() -> FormattedTB:
    formatter = FormattedTB(mode="Context")
    getattr(formatter, "set_theme_name", formatter.set_colors)("linux")
    return formatter


def test_a_traceback_has_colours_up_to_a_number_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an import that fails deep in a large package takes minutes to show on a busy machine."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = {
        "first_of_chain": "second_of_chain",
        "second_of_chain": "third_of_chain",
        "third_of_chain": "nothing_there",
    }
    for name, imported in modules.items():
        (tmp_path / f"{name}.py").write_text(f"x = 1\nimport {imported}\n" + "y = 2\n" * 600)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("first_of_chain")
    assert not modules.keys() & sys.modules.keys()
    shown, formatter = "", coloured()
    with limit_colours(formatter):
        shown = "".join(formatter.structured_traceback(caught.type, caught.value, caught.tb))
    assert "import second_of_chain" not in shown, "escape sequences are within"
    assert "import third_of_chain" in shown and "import nothing_there" in shown
    assert type(formatter) is FormattedTB
    assert "import third_of_chain" not in "".join(
        formatter.structured_traceback(caught.type, caught.value, caught.tb)
    ), "outside of `limited_colours` the formatter does as ever"


def test_a_rendered_error_is_not_rendered_again_for_the_history() -> None:
    error = ValueError("no")
    shell: Any = SimpleNamespace(_shown=(error, ("as it was rendered",)))
    kept = CellShell._format_exception_for_storage(shell, error)
    assert kept == {"ename": "ValueError", "evalue": "no", "traceback": ["as it was rendered"]}


def test_the_loss_of_a_worker_is_raised_before_the_errors_that_may_follow_from_it() -> None:
    broken = Failed("worker1", RuntimeError("Connection closed by peer"), ["a line"], False)
    dead = Failed("worker2", WorkerLostError("worker2 was lost"), [], False)
    error = combined_error([broken, dead], None)
    assert error is dead.error and error.__notes__ == ["also on worker1: RuntimeError: Connection closed by peer"]
    own = Failed("worker3", WorkerLostError("worker9 was lost"), ["a line"], False)  # raised by the cell
    assert combined_error([broken, own], None) is broken.error


def _fails_deep_in_torch() -> None:
    nn.Sequential(nn.Sequential(nn.Linear(2, 2)))(torch.ones(3))


def _fails_after_torch() -> None:
    try:
        _fails_deep_in_torch()
    except RuntimeError as error:
        raise ValueError("no") from error


def test_long_runs_of_torchs_frames_are_left_out_and_counted_also_in_causes() -> None:
    with pytest.raises(ValueError) as caught:
        _fails_after_torch()
    cause = caught.value.__cause__
    assert cause is not None
    whole = traceback.extract_tb(cause.__traceback__)
    with fold_causes(caught.value) as left_out:
        shown = traceback.extract_tb(cause.__traceback__)
        assert [frame.name for frame in shown] == ["_fails_after_torch", "_fails_deep_in_torch"]
        assert left_out == len(whole) - len(shown) > 3
    assert traceback.extract_tb(cause.__traceback__) == whole
    assert fold_torch(caught.tb)[1] == 0


def test_after_a_loss_an_error_of_a_collective_is_one_line() -> None:
    broken = Failed("worker1", RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error"), ["a line"] * 99, False)
    dead = Failed("worker2", WorkerLostError("worker2 was lost"), [], False)
    shell: Any = SimpleNamespace()
    lines = combined_error([broken, dead], shell)._render_traceback_()  # type: ignore[attr-defined]
    assert lines == [
        "[worker2] WorkerLostError: worker2 was lost",
        "[worker1] RuntimeError in a collective, too: %debug worker1 shows where.",
    ]
