"""Sources of cells: what a process sends, what it keeps of others, and the names of cells in tracebacks."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcbench.base import rebuild, sources
from rpcbench.base.sources import CodeSource

FILE = "/nowhere/ipykernel_1/42.py"
TEXT = "def fail(x):\n    y = x\n    return 1 / y\n"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for file in sources._kept:
        linecache.cache.pop(file, None)
    sources._kept.clear()


def function() -> Any:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(TEXT, FILE, "exec", dont_inherit=True), names)
    return names["fail"]


def test_a_kept_source_is_found_as_that_of_a_cell_and_sent_on() -> None:
    assert sources.code_source(FILE) is None
    sources.keep_source(FILE, CodeSource("Cell In[3]", TEXT))
    linecache.checkcache()
    assert inspect.getsource(function()) == TEXT
    assert sources.code_source(FILE) == CodeSource("Cell In[3]", TEXT)
    sources.keep_source(FILE, CodeSource("Cell In[3]", TEXT + "# changed\n"))
    assert "# changed" in linecache.getlines(FILE)[-1]


def test_a_remote_traceback_has_the_name_of_the_cell_and_its_lines() -> None:
    sources.keep_source(FILE, CodeSource("Cell In[3]", TEXT))
    with pytest.raises(ZeroDivisionError) as caught:
        function()(0)
    told = rebuild.format_traceback(caught.value)
    assert "\n  Cell In[3], line 3, in fail\n    return 1 / y\n" in told and FILE not in told
    assert f'File "{__file__}", line' in told


def test_what_this_process_has_itself_is_not_replaced(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("here = 1\n")
    sources.keep_source(str(own), CodeSource(None, "there = 2\n"))
    assert linecache.getlines(str(own)) == ["here = 1\n"]
    linecache.cache[FILE] = len(TEXT), None, TEXT.splitlines(True), FILE
    try:
        sources.keep_source(FILE, CodeSource("Cell In[9]", "other\n"))
        assert "".join(linecache.getlines(FILE)) == TEXT and sources.cell_name(FILE) is None
    finally:
        del linecache.cache[FILE]


def test_a_module_is_not_sent_and_the_program_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TEXT)
    linecache.getlines(str(program))
    assert sources.code_source(str(program)) is None
    monkeypatch.setattr("__main__.__file__", str(program), raising=False)
    assert sources.code_source(str(program)) == CodeSource(None, TEXT)
