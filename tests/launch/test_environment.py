"""Workers have the variables and the interpreter that were asked for, and differing packages are told in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from sizes import long

import rpcbench
from rpcbench.launch import environment, fork_client, worker_main
from rpcbench.launch.environment import (
    Interpreter,
    find_interpreter,
    version_differences,
    warn_of_debugging,
    worker_environment,
)

# ---- variables


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"A=B": "1"}, "env: 'A=B' is not the name of a variable"),
        ({"": "1"}, "env: '' is not the name of a variable"),
        ({"A": True}, "env: the value of A has to be a text, not True"),
        ({"A": ["x"]}, "env: the value of A has to be a text, not ['x']"),
        ({"RANK": "3"}, "env: the cluster itself sets RANK on its workers; leave it out"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "env: the cluster sets CUDA_VISIBLE_DEVICES; choose GPUs by gpus=[0, 1]"),
    ],
    ids=str,
)
def test_a_variable_that_is_none_is_told_in_one_sentence(env: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        worker_environment(env, pins=True)


def test_values_become_texts_and_gpus_may_be_hidden_where_none_is_assigned() -> None:
    assert worker_environment({"A": 2, "B": "x"}) == {"A": "2", "B": "x"} and worker_environment(None) == {}
    assert worker_environment({"CUDA_VISIBLE_DEVICES": ""}) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.process
def test_a_variable_with_which_torch_ends_workers_is_warned_of(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    warn_of_debugging({})
    with pytest.warns(RuntimeWarning, match="DETAIL: with it .* ends a worker by SIGSEGV .* Set it to INFO or OFF"):
        warn_of_debugging({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    warn_of_debugging({"TORCH_DISTRIBUTED_DEBUG": "OFF"})
    with pytest.warns(RuntimeWarning, match="SIGSEGV"), rpcbench.Cluster(1):
        pass


def test_a_mistake_comes_before_any_process_starts(no_leaks: None) -> None:
    with pytest.raises(ValueError, match="sets MASTER_ADDR"):
        rpcbench.Cluster(1, env={"MASTER_ADDR": "here"})


@pytest.mark.process
def test_a_warm_fork_server_is_kept_unless_a_variable_counts_when_torch_is_loaded(no_leaks: None) -> None:
    def server(**env: str) -> int:
        with rpcbench.Cluster(1, env=env) as made:
            return int(made.rpc_sync("worker1", os.getppid))

    first = server()
    assert server(OF_MINE="1") == first
    other = server(LD_BIND_NOW="1")
    assert other != first
    assert b"LD_BIND_NOW=1" in Path(f"/proc/{other}/environ").read_bytes(), "it was there when the process began"
    fork_client.stop_idle()


# ---- interpreters
@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another interpreter, in a virtual environment of its own, with the packages of this one."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    ours = [str(Path(rpcbench.__file__).parents[1]), *(entry for entry in sys.path if "site-packages" in entry)]
    (packages / "ours.pth").write_text("\n".join(ours))
    (packages / "only_here.py").write_text("WHERE = 'the other environment'\n")
    return folder


def test_an_interpreter_brings_its_import_path_and_ours_without_our_packages(venv: Path) -> None:
    found = find_interpreter(str(venv / "bin" / "python"))
    assert found.executable == str(venv / "bin" / "python")
    path = found.import_path()
    assert any(entry.startswith(str(venv)) for entry in path)
    assert find_interpreter(None) == Interpreter() == find_interpreter(sys.executable)
    assert find_interpreter(None).import_path() == sys.path


def fake(folder: Path, says: str) -> str:
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    return str(program)


MISTAKES = [
    ("{folder}/none", "python='{folder}/none' is no program here; name an interpreter, such as /path/of/venv/bin"),
    ("{folder}", "python='{folder}' is a folder; name the interpreter in it: {folder}/bin/python"),
    ("/bin/true", "python='/bin/true' does not run as a Python interpreter: "),
    ("echo 3.11", "does not run as a Python interpreter"),
    ("echo no such thing >&2; exit 1", "does not run as a Python interpreter: no such thing"),
    ('echo \'{{"python": "3.99.1", "own": [], "protocol": null, "missing": []}}\'', "is Python 3.99.1, and this proc"),
    (
        'echo \'{{"python": "VERSION", "own": [], "protocol": null, "missing": ["rpcbench", "torch"]}}\'',
        "has no rpcbench, torch: install the same rpcbench there, with the packages that it needs",
    ),
    (
        'echo \'{{"python": "VERSION", "own": [], "protocol": 0, "missing": []}}\'',
        "has another version of rpcbench than this process: install the same there",
    ),
]


@pytest.mark.parametrize(("python", "sentence"), MISTAKES, ids=[says[:30] for says, _ in MISTAKES])
def test_an_unsuitable_interpreter_is_refused_before_any_process_starts(
    tmp_path: Path, no_leaks: None, python: str, sentence: str
) -> None:
    python = python.format(folder=tmp_path).replace("VERSION", environment.platform.python_version())
    if python.startswith("echo"):
        python = fake(tmp_path, python)
    with pytest.raises(ValueError, match=re.escape(sentence.format(folder=tmp_path))) as told:
        rpcbench.Cluster(1, python=python)
    assert "\n" not in str(told.value)


def test_a_launcher_that_takes_no_interpreter_says_so(no_leaks: None) -> None:
    def make(directory: object, greeting: str = "") -> None:
        raise AssertionError("it is not called")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpcbench.launch.registry._load_maker", lambda name: make)
        with pytest.raises(ValueError, match=r"'ray': got an unexpected keyword argument 'python'; its options: greet"):
            rpcbench.Cluster(1, launcher="ray", python="python3")


WAYS: dict[str, dict[str, Any]] = {
    "fork": {},
    "kernel": {"kind": "kernel"},
    "torchrun": {"launcher": "torchrun"},
    "command": {"launcher": "command", "options": {"template": "{cmd}"}, "address": "127.0.0.1"},
}
CODE = """
import os, sys, only_here, torch
(sys.prefix, only_here.WHERE, torch.get_num_threads(), os.environ["OF_MINE"], os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.process
@pytest.mark.parametrize("way", ["fork", "kernel", *long("torchrun", "command")])
def test_workers_of_every_launcher_have_the_interpreter_and_the_variables(no_leaks: None, venv: Path, way: str) -> None:
    expected = (str(venv), "the other environment", 3, "a=b", "3")
    env = {"OMP_NUM_THREADS": "3", "OF_MINE": "a=b"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the same packages: nothing to tell
        with rpcbench.Cluster(1, env=env, python=str(venv / "bin" / "python"), **WAYS[way]) as made:
            assert made.run("worker1", CODE) == expected
            assert made.rpc_sync("worker1", max, (3, 5)) == 5
            if way == "fork":
                made.restart("worker1")
                assert made.run("worker1", CODE) == expected
    assert "OF_MINE" not in os.environ
    fork_client.stop_idle()


# ---- packages
HERE = {"Python": "3.11.7", "torch": "2.14.0", "numpy": "2.1.0", "cloudpickle": "3.1"}


def test_differing_versions_are_one_sentence_with_the_workers() -> None:
    assert version_differences(HERE, {"worker1": HERE, "worker2": HERE}) == ""
    old = {**HERE, "torch": "2.13.0"}
    assert version_differences(HERE, {"worker1": HERE, "worker2": old}) == (
        "worker2 has torch 2.13.0; this process has torch 2.14.0: what one side sends, the other may not be able to "
        "read"
    )
    older = {**old, "numpy": "1.26.4", "Python": "3.11.9"}
    assert version_differences(HERE, {"worker1": old, "worker2": older, "worker3": old}) == (
        "worker1, worker3 have torch 2.13.0; worker2 has Python 3.11.9 and torch 2.13.0 and numpy 1.26.4; this process "
        "has Python 3.11.7 and torch 2.14.0 and numpy 2.1.0: what one side sends, the other may not be able to read"
    )


def test_the_versions_are_those_that_are_loaded() -> None:
    import numpy
    import torch

    found = environment.versions()
    assert list(found) == list(HERE) and (found["torch"], found["numpy"]) == (torch.__version__, numpy.__version__)


@pytest.mark.process
def test_a_cluster_tells_them_once_when_workers_join(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {**environment.versions(), "torch": "0.0.1"}
    monkeypatch.setattr(environment, "versions", lambda: there)  # of this process; those of workers are the real ones
    sentence = r"^worker1, worker2 have torch .*; this process has torch 0\.0\.1: "
    with pytest.warns(RuntimeWarning, match=sentence) as told, rpcbench.Cluster(2) as made:
        assert made.run("worker1", "1 + 1") == 2
    assert len(told) == 1
    assert worker_main.versions is not environment.versions, "a worker asks for its own"
