"""Clusters that pyproject.toml and the user's file describe: where they are found, and what a mistake says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rpcbench
from rpcbench.launch import saved
from rpcbench.notebook.completion import Vocabulary

PROJECT = """
[project]
name = "mine"

[tool.rpcbench.clusters.lab]
workers = 3
launcher = "command"
hosts = ["node1", "node2"]
options = {template = "ssh {host} {cmd}"}
env = {OMP_NUM_THREADS = 2, MODE = "debug"}
grace = 7

[tool.rpcbench.clusters.small]
workers = 1
python = "venv/bin/python"
name = "mini"
"""
USERS = """
[clusters.lab]
workers = 9

[clusters.mine]
kind = "kernel"
gpus = [0, 1]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder below that of a project, and a user's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    deep = tmp_path / "work" / "deep"
    deep.mkdir(parents=True)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "rpcbench.toml").write_text(USERS)
    (tmp_path / "work" / "pyproject.toml").write_text(PROJECT)
    monkeypatch.chdir(deep)
    return tmp_path / "work"


def test_the_nearest_project_comes_before_the_users_file(project: Path) -> None:
    assert saved.names() == ["lab", "small", "mine"]
    lab = saved.find("lab")
    assert lab.name == "lab" and lab.arguments == {
        "n": 3, "launcher": "command", "grace": 7, "env": {"OMP_NUM_THREADS": 2, "MODE": "debug"},
        "options": {"template": "ssh {host} {cmd}", "hosts": ["node1", "node2"]},
    }  # fmt: skip
    assert saved.find("mine").arguments == {"n": 2, "kind": "kernel", "gpus": [0, 1]}
    small = saved.find("small")
    assert small.name == "mini" and small.arguments == {"n": 1, "python": str(project / "venv/bin/python")}


def test_the_file_of_an_outer_folder_is_not_read_where_a_nearer_one_is(project: Path) -> None:
    (project / "deep" / "pyproject.toml").write_text("[project]\nname = 'inner'\n")
    assert saved.names() == ["lab", "mine"] and saved.find("lab").arguments == {"n": 9}


def test_changes_replace_and_add(project: Path) -> None:
    lab = saved.find("lab")
    changed = lab.changed({"n": 1, "env": {"MODE": "fast"}, "options": {"hosts": "node9"}})
    assert changed["n"] == 1 and changed["env"] == {"OMP_NUM_THREADS": 2, "MODE": "fast"}
    assert changed["options"] == {"template": "ssh {host} {cmd}", "hosts": "node9"}
    assert lab.changed({"kind": "kernel"}) == {"n": 3, "grace": 7, "env": lab.arguments["env"], "kind": "kernel"}
    assert lab.arguments["n"] == 3


MISTAKES = [
    ("[clusters.lab]\nwrokers = 2", "{file}, cluster 'lab': there is no key 'wrokers'; did you mean workers? There"),
    ("[clusters.lab]\nworkers = '2'", "{file}, cluster 'lab': workers has to be a number, not '2'"),
    ("[clusters.lab]\nworkers = true", "{file}, cluster 'lab': workers has to be a number, not True"),
    ("[clusters.lab]\nworkers = 0", "{file}, cluster 'lab': workers has to be a whole number of at least 1, not 0"),
    ("[clusters.lab]\nhosts = 3", "{file}, cluster 'lab': hosts has to be a text or a list, not 3"),
    ("[clusters]\nlab = 2", "{file}, cluster 'lab': it has to be a table"),
    ("clusters = 2", "{file}: clusters has to be a table, [clusters.lab]"),
    ("[clusters.lab]\nworkers = ", "{file} cannot be read as TOML: Invalid value (at end of document)"),
    ("[clusters.lab]\nname = x\n", "{file} cannot be read as TOML: Invalid value (at line 2, column 8)"),
    ("[clusters.lba]", "no cluster 'lab' is saved: did you mean lba? There are lba, in {file}"),
]


@pytest.mark.parametrize(("text", "sentence"), MISTAKES, ids=[text.replace("\n", " ") for text, _ in MISTAKES])
def test_a_mistake_is_one_sentence_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rpcbench.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence.format(file=file))}") as told:
        rpcbench.Cluster.saved("lab")
    assert "\n" not in str(told.value)


def test_without_a_file_it_says_where_to_write_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert saved.names() == []
    with pytest.raises(ValueError, match=r"write \[tool\.rpcbench\.clusters\.lab\] with workers = 4 into pyproject"):
        saved.find("lab")


def test_names_are_offered_after_start() -> None:
    vocabulary = Vocabulary((), (), (), ("start",), saved=("lab", "mine"))
    assert vocabulary.after("%cluster", ["start"])[:2] == ["lab", "mine"]
    assert "lab" not in vocabulary.after("%cluster", ["start", "lab"])


@pytest.mark.process
def test_a_saved_cluster_starts_with_changes(project: Path, no_leaks: None) -> None:
    with rpcbench.Cluster.saved("lab", n=1, launcher="local", env={"MODE": "fast"}) as made:
        code = "import os, torch\n(os.environ['MODE'], torch.get_num_threads())"
        assert made.run("worker1", code) == ("fast", 2) and made.workers == ["worker1"]
