"""Modules that are reloaded on all members: changed ones, new ones, packages, and ones that cannot be reloaded."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import cluster_fixture

import rpcbench
from rpcbench.cells.reload import ModuleSource, execute_sources, read_source

pytestmark = pytest.mark.process
cluster = cluster_fixture(1, scope="function")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of this process only: the workers have started already, or have another path."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("rb_"):
            del sys.modules[name]


def test_reload_updates_a_changed_module_here_and_on_the_workers(folder: Path) -> None:
    file = folder / "rb_helpers.py"
    file.write_text("def version():\n    return 1\n")
    helpers = importlib.import_module("rb_helpers")
    with rpcbench.Cluster(1) as cluster:
        assert cluster.rpc_sync("worker1", helpers.version) == 1
        file.write_text("def version():\n    return 2\n\ndef fails():\n    raise LookupError('new text')\n")
        cluster.reload("rb_helpers")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (helpers.version(), cluster.rpc_sync("worker1", helpers.version)) == (2, 2)
        with pytest.raises(LookupError) as raised:
            cluster.rpc_sync("worker1", helpers.fails)
        assert "raise LookupError('new text')" in str(raised.value.__cause__)


@pytest.mark.usefixtures("folder")
def test_reload_sends_the_source_of_a_module_that_workers_cannot_find(cluster: rpcbench.Cluster, folder: Path) -> None:
    (folder / "rb_package").mkdir()
    (folder / "rb_package" / "__init__.py").write_text("NAME = 'package'\n")
    (folder / "rb_package" / "part.py").write_text("from rb_package import NAME\n\ndef name():\n    return NAME\n")
    cluster.reload("rb_package", "rb_package.part")
    part = importlib.import_module("rb_package.part")
    assert cluster.rpc_sync("worker1", part.name) == "package"
    file = cluster.run("worker1", "import rb_package\nrb_package.part.__file__")
    assert file == str(folder / "rb_package" / "part.py")


def test_a_reloaded_package_has_its_submodules_where_it_was_not_loaded_before(folder: Path) -> None:
    (folder / "rb_whole").mkdir()
    (folder / "rb_whole" / "__init__.py").write_text("from .part import name\n")
    (folder / "rb_whole" / "part.py").write_text("def name():\n    return 'part'\n")
    importlib.import_module("rb_whole")
    with rpcbench.Cluster(1) as cluster:  # its worker has the path of this process, and has not loaded the package
        cluster.reload("rb_whole")
        assert cluster.run("worker1", "import rb_whole.part\nrb_whole.name()") == "part"


def test_a_module_that_fails_here_is_not_changed_on_the_workers(cluster: rpcbench.Cluster, folder: Path) -> None:
    file = folder / "rb_broken.py"
    file.write_text("VALUE = 1\n")
    cluster.reload("rb_broken")
    for text, error in (("VALUE = 2\n1 +\n", SyntaxError), ("1 / 0\n", ZeroDivisionError)):
        file.write_text(text)
        with pytest.raises(error):
            cluster.reload("rb_broken")
        assert cluster.run("worker1", "import rb_broken\nrb_broken.VALUE") == 1


def test_a_module_that_fails_on_a_worker_raises_its_error_here(cluster: rpcbench.Cluster, folder: Path) -> None:
    code = "import os\nif os.getpid() != HERE:\n    raise BufferError('there')\n".replace("HERE", "{}")
    (folder / "rb_picky.py").write_text(code.format(__import__("os").getpid()))
    with pytest.raises(BufferError, match="there"):
        cluster.reload("rb_picky")
    with pytest.raises(ModuleNotFoundError):
        cluster.run("worker1", "import rb_picky")


@pytest.mark.parametrize(("module", "words"), [("rb_nowhere", "no module 'rb_nowhere'"), (math, "math is not written")])
def test_a_module_without_source_text_is_refused(module: object, words: str) -> None:
    with pytest.raises(ImportError, match=words):
        read_source(module)  # type: ignore[arg-type]


def test_a_new_module_that_fails_is_not_left_in_sys_modules() -> None:
    with pytest.raises(ZeroDivisionError):
        execute_sources([ModuleSource("rb_fails", "1 / 0", "rb_fails.py", False)])
    assert "rb_fails" not in sys.modules
