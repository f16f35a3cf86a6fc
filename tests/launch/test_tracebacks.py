"""Tracebacks as a user sees them: without the frames that say nothing to him."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest

from rpcbench.launch.tracebacks import of_user
from rpcbench.pipeline.chance import seeded
from rpcbench.words.futures import blocked


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
