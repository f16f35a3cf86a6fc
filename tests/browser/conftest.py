"""A JupyterLab for all tests of a module, or the front end that it asks for."""

from __future__ import annotations

import pytest
from lab import SECONDS, missing, running


@pytest.fixture(scope="module")
def lab(request, leak_check, tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    front = getattr(request, "param", "jupyterlab")
    with leak_check(grace=SECONDS), running(tmp_path_factory.mktemp("lab"), front=front) as lab:
        yield lab


@pytest.fixture
def show(lab):
    """Opens a notebook; at the end no page has had an error or asked any other host for something."""
    yield lab.open
    assert lab.wrong == []
