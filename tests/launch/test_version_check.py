"""A function that is sent by name and has another text on the worker: this is reported once, with both files."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds import until

import rpcbench
from rpcbench.runtime.requests import SourceCheck
from rpcbench.serialization.functions_used import module_functions

BEFORE = """
import functools

def traced(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

def area(x):
    return 3 * x

@traced
def volume(x):
    return 4 * x
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the user, which the workers load from the same file."""
    (tmp_path / "shapes_of_mine.py").write_text(BEFORE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("shapes_of_mine")
    del sys.modules["shapes_of_mine"]


def change(module: Any, old: str, new: str) -> None:
    """Change the text of a module, in its file only."""
    file = Path(module.__file__)
    file.write_text(file.read_text().replace(old, new))
    os.utime(file, (1e9, 1e9 + len(new)))  # otherwise Python would use its cached bytecode


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_another_version_of_a_function_on_a_worker_is_reported_once(
    no_leaks: None, module: Any, told: list[warnings.WarningMessage]
) -> None:
    with rpcbench.Cluster(2) as cluster:
        for function in (module.area, module.volume, len):
            assert cluster.rpc_sync("worker1", function, ("x",))
        change(module, "import functools", "import functools  # which says nothing new\n")
        importlib.reload(module)
        assert cluster.rpc_sync("worker1", module.area, (1,)) == 3
        change(module, "4 * x", "5 * x")
        importlib.reload(module)
        for _ in range(3):
            assert cluster.rpc_sync("worker1", module.volume, (1,)) == 4
        until(lambda: bool(told), "the warning")
        assert cluster.rpc_sync("worker2", module.volume, (1,)) == 5, "worker2 has only now loaded the module"
        cluster.restart("worker1")
        assert cluster.rpc_sync("worker1", module.volume, (1,)) == 5
    (words,), file = [str(each.message) for each in told], module.__file__
    assert words.startswith("worker1 runs another version of shapes_of_mine.volume: it has loaded")
    assert f"it has loaded {file}, and this process {file}. " in words
    assert words.endswith("by cluster.reload('shapes_of_mine'), or restart worker1")
    assert told[0].filename == file and told[0].category is RuntimeWarning


def test_a_restarted_worker_is_checked_again(no_leaks: None, module: Any, told: list[warnings.WarningMessage]) -> None:
    with rpcbench.Cluster(1) as cluster:
        assert cluster.rpc_sync("worker1", module.area, (1,)) == 3
        change(module, "3 * x", "7 * x")
        cluster.restart("worker1")
        assert cluster.remote("worker1", module.area, (1,)).to_here() == 7
        until(lambda: bool(told), "the warning")
    assert "worker1 runs another version of shapes_of_mine.area" in str(told[0].message)


def test_the_modules_that_a_function_by_value_uses_are_checked(
    no_leaks: None, module: Any, told: list[warnings.WarningMessage]
) -> None:
    volume = module.volume

    def inner(x: int) -> int:
        return int(module.area(x))

    def of_module() -> int:
        return inner(1)

    def of_name(_: object = None) -> int:
        return int(volume(1))

    with rpcbench.Cluster(2) as cluster:
        assert cluster.spmd(lambda: (of_module(), of_name())) == [(3, 4)] * 2
        for old, new in (("3 * x", "7 * x"), ("4 * x", "8 * x")):
            change(module, old, new)
        importlib.reload(module)
        volume = module.volume
        assert cluster.rpc_sync("worker1", of_module) == 3
        until(lambda: len(told) == 1, "the warning of a call")
        assert list(cluster.map(of_name, [0], workers="worker1", progress=False)) == [4]
        until(lambda: len(told) == 2, "the warning of a task")
        cluster.run("worker2", "", push={"f": functools.partial(of_module)})
        until(lambda: len(told) == 3, "the warning of a variable")
        assert cluster.spmd(of_name, workers="worker2") == [4]
        until(lambda: len(told) == 4, "the warning of a rank")
    words = [str(each.message).partition(":")[0] for each in told]
    assert words == [
        f"{worker} runs another version of shapes_of_mine.{name}"
        for worker in ("worker1", "worker2")
        for name in ("area", "volume")
    ]


def test_only_functions_of_the_users_own_modules_are_looked_at(module: Any) -> None:
    class Kind:
        def method(self) -> Any:
            return module.area(textwrap.dedent("1"))

    def use() -> Any:
        return Kind().method(), os.path.join("a"), np.linalg.norm, use

    assert list(module_functions(use)) == [module.area]


def test_an_answer_about_a_function_that_was_reloaded_meanwhile_is_no_warning(
    module: Any, told: list[warnings.WarningMessage]
) -> None:
    handlers: dict[str, Any] = {}
    sent: list[dict[str, Any]] = []
    members: Any = SimpleNamespace(add_watcher=lambda look: None, member_name=lambda id_: f"worker{id_}")
    channels: Any = SimpleNamespace(register_handler=handlers.__setitem__)
    check = SourceCheck(0, members, channels, lambda to, channel, asked: sent.append(asked))
    check.check_function(1, module.area)
    change(module, "3 * x", "7 * x")
    importlib.reload(module)
    handlers["source differs"](1, {**sent[-1], "there": module.__file__})
    assert told == []
    check.check_function(1, module.area)
    handlers["source differs"](1, {**sent[-1], "there": module.__file__})
    assert len(sent) == 2 and "worker1 runs another version of shapes_of_mine.area" in str(told[0].message)
