"""One JupyterLab and one browser for all tests, which leave no page, no kernel and no worker in them."""

from __future__ import annotations

import contextlib

import pytest
from lab import SECONDS, missing, running

BROWSER = ("chrom",)


@pytest.fixture(scope="session")
def fronts(leak_check, tmp_path_factory):
    """Each front end, once it is asked for."""
    started = {}
    with leak_check(grace=SECONDS), contextlib.ExitStack() as stack:

        def front(name):
            if name not in started:
                started[name] = stack.enter_context(running(tmp_path_factory.mktemp("lab"), front=name))
            return started[name]

        yield front


@pytest.fixture(scope="module")
def lab(request, fronts, leak_check):
    """JupyterLab, or the front end that a test asks for, without a page; afterwards all that ran in it has ended."""
    if reason := missing():
        pytest.skip(reason)
    lab = fronts(getattr(request, "param", "jupyterlab"))
    with leak_check(grace=SECONDS, but=BROWSER):  # the browser keeps some of its processes for later pages
        yield lab
        lab.leave()


@pytest.fixture
def show(lab):
    """Opens a notebook; at the end no page has had an error or asked any other host for something."""
    lab.wrong.clear()
    yield lab.open
    assert lab.wrong == []
