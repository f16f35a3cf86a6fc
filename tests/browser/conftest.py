"""One JupyterLab and one browser for all tests, which leave no page, no kernel and no worker in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import SECONDS, Lab, missing, running
from leaks import nothing_left

BROWSER = ("chrom",)


class Front:
    """The front end that runs: one at a time, since playwright keeps an event loop running in this thread."""

    def __init__(self) -> None:
        self._name = ""
        self._lab: Lab | None = None
        self._running = contextlib.ExitStack()

    def lab(self, name: str, folder: Path) -> Lab:
        """The front end of this name; another one ends first."""
        if self._lab is None or self._name != name:
            self.end()
            self._running.enter_context(nothing_left(grace=SECONDS))
            self._name, self._lab = name, self._running.enter_context(running(folder, front=name))
        return self._lab

    def end(self) -> None:
        self._lab = None
        self._running.close()


_front = Front()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The front end ends with the last test of this folder: tests elsewhere run event loops of their own."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            _front.end()


@pytest.fixture(scope="module")
def lab(request, tmp_path_factory):
    """JupyterLab, or the front end that a test asks for, without a page; afterwards all that ran in it has ended."""
    if reason := missing():
        pytest.skip(reason)
    lab = _front.lab(getattr(request, "param", "jupyterlab"), tmp_path_factory.mktemp("lab"))
    with nothing_left(grace=SECONDS, but=BROWSER):  # the browser keeps some of its processes for later pages
        yield lab
        lab.leave()


@pytest.fixture
def show(lab):
    """Opens a notebook; at the end no page has had an error or asked any other host for something."""
    lab.wrong.clear()
    yield lab.open
    assert lab.wrong == []
