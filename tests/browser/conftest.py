"""A JupyterLab for all tests of a module."""

from __future__ import annotations

import pytest
from lab import SECONDS, missing, running


@pytest.fixture(scope="module")
def lab(leak_check, tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    with leak_check(grace=SECONDS), running(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def show(lab):
    """Opens a notebook; at the end no page has had an error or asked any other host for something."""
    yield lab.open
    assert lab.wrong == []
