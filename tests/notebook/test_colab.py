"""Colab shows widgets of other packages only once it is asked to: loading the extension asks it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from rpcbench.notebook import admit_widgets, magics


@pytest.fixture
def admitted(monkeypatch):
    """A stand-in for Colab's package; gives a list with an entry for each call."""
    calls = []
    output = ModuleType("google.colab.output")
    output.enable_custom_widget_manager = lambda: calls.append("asked")
    for module in (ModuleType("google"), ModuleType("google.colab"), output):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_loading_the_extension_in_colab_admits_its_widgets_once(admitted, monkeypatch):
    monkeypatch.setattr(magics.process, "warm", lambda: None)
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.kernel = SimpleNamespace(do_complete=1, do_inspect=2)
    magics.register(shell)
    try:
        magics.register(shell)
        assert admitted == ["asked"]
    finally:
        magics.unregister(shell)


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", None)  # not to be found
    monkeypatch.delitem(sys.modules, "google.colab.output", raising=False)
    admit_widgets()


def test_an_error_in_colab_itself_is_not_hidden(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "google"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "google" / "colab"
    package.mkdir(parents=True)
    (tmp_path / "google" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "output.py").write_text("import a_part_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_part_that_is_missing"):
        admit_widgets()
    for name in ("google.colab", "google"):  # of this test; those before it come back
        del sys.modules[name]
