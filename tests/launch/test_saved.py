"""Clusters that the user's file and pyproject.toml describe: where they are found, which files are refused, and what a
mistake says."""

from __future__ import annotations

import grp
import os
import pwd
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
[clusters.other]
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


def test_the_users_file_comes_before_the_nearest_project(project: Path, tmp_path: Path) -> None:
    assert saved.saved_cluster_names() == ["other", "mine", "lab", "small"]
    lab = saved.find_cluster("lab")
    assert lab.name == "lab" and lab.file == project / "pyproject.toml" and lab.arguments == {
        "n": 3, "launcher": "command", "grace": 7, "env": {"OMP_NUM_THREADS": 2, "MODE": "debug"},
        "options": {"template": "ssh {host} {cmd}", "hosts": ["node1", "node2"]},
    }  # fmt: skip
    assert saved.find_cluster("mine").arguments == {"n": 2, "kind": "kernel", "gpus": [0, 1]}
    small = saved.find_cluster("small")
    assert small.name == "mini" and small.arguments == {"n": 1, "python": str(project / "venv/bin/python")}
    users = tmp_path / "config" / "rpcbench.toml"
    users.write_text("[clusters.lab]\nworkers = 4")
    assert saved.find_cluster("lab").file == users and saved.find_cluster("lab").arguments == {"n": 4}


def test_the_file_of_an_outer_folder_is_not_read_where_a_nearer_one_is(project: Path) -> None:
    (project / "deep" / "pyproject.toml").write_text("[project]\nname = 'inner'\n")
    assert saved.saved_cluster_names() == ["other", "mine"]


# -- files that others may have written
def refused(words: str) -> None:
    with pytest.raises(ValueError, match=f"pyproject.toml is not used, .*{words}"):
        saved.find_cluster("lab")
    assert saved.find_cluster("mine").name == "mine", "the user's own file comes first, and needs no other"
    assert saved.saved_cluster_names() == ["other", "mine"]
    with pytest.raises(
        ValueError, match=r"no cluster 'lba' is saved: .*[Tt]here are other, mine, in \S+rpcbench\.toml$"
    ):
        saved.find_cluster("lba")  # which the refused file does not have


NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project / "pyproject.toml"
    os.chown(file, NOBODY, NOBODY)
    refused(rf"{re.escape(str(file))} belongs to user (nobody|{NOBODY})")
    os.chown(file, 0, 0)
    os.chown(project, NOBODY, NOBODY)
    refused(rf"{re.escape(str(project))} belongs to user (nobody|{NOBODY})")
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(ValueError, match=r"rpcbench\.toml is not used, .*rpcbench\.toml belongs to user root"):
        saved.find_cluster("mine")  # files of root, as with git


def test_a_file_that_other_users_may_write_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project / "pyproject.toml"
    file.chmod(0o646)
    refused(rf"other users may write {re.escape(str(file))} \(mode 0646\)")
    file.chmod(0o644)
    project.chmod(0o1777)  # as /tmp
    refused(rf"other users may write {re.escape(str(project))} \(mode 1777\)")
    project.chmod(0o755)
    (project / "deep" / "pyproject.toml").symlink_to(file)
    (project / "deep").chmod(0o757)  # anybody may point the link elsewhere
    refused(r"other users may write .*deep \(mode 0757\)")


def test_a_group_of_this_user_alone_may_write(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each user has a group, and the mode of new files lets it write."""
    me = saved._user_name(os.geteuid())
    group = [me, "x", os.getegid(), []]
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(group))
    (project / "pyproject.toml").chmod(0o664)
    assert saved.find_cluster("lab").name == "lab"
    group[3] = [me, "mallory"]
    refused("other users may write .*mode 0664")
    group[:1], group[3] = ["staff"], []
    refused("other users may write .*mode 0664")


@pytest.mark.parametrize("edge", ["home", "repository"])
def test_a_file_above_the_home_or_the_repository_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, edge: str
) -> None:
    deep = project / "deep"
    if edge == "home":
        monkeypatch.setenv("HOME", str(deep))
    else:
        (deep / ".git").mkdir()
    refused(rf"as it is above (your home|the repository) {re.escape(str(deep))}: copy the tables that you trust to ")
    (deep / "pyproject.toml").write_text(PROJECT)
    assert saved.find_cluster("lab").file == deep / "pyproject.toml"


@pytest.mark.parametrize("text", ["[clusters", "tool = 2", f"a = {'[' * 5000}", f"a = {'1' * 5000}"], ids=range(4))
def test_a_refused_file_that_is_no_toml_breaks_nothing(project: Path, text: str) -> None:
    (project / "deep" / ".git").mkdir()
    (project / "pyproject.toml").write_text(text)
    assert saved.saved_cluster_names() == ["other", "mine"]
    with pytest.raises(ValueError, match=r"no cluster 'lab' is saved: .*[Tt]here are other, mine"):
        saved.find_cluster("lab")
    (project / "deep" / ".git").rmdir()
    with pytest.raises(ValueError, match=r"pyproject\.toml(: tool has to be a table| cannot be read as TOML: )"):
        saved.saved_cluster_names()  # of this user's own file the mistake is told


@pytest.mark.parametrize("configuration", [True, False])
def test_a_user_without_a_home_has_clusters(
    project: Path, monkeypatch: pytest.MonkeyPatch, configuration: bool
) -> None:
    """As in a container with an arbitrary user id, where neither HOME nor the list of users has one."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    if not configuration:
        monkeypatch.delenv("XDG_CONFIG_HOME")
    assert saved.saved_cluster_names() == [*(["other", "mine"] if configuration else []), "lab", "small"]
    (project / "pyproject.toml").unlink()
    place = (
        r"[Tt]here are other, mine" if configuration else r"rpcbench\.toml in a directory that XDG_CONFIG_HOME names"
    )
    with pytest.raises(ValueError, match=f"no cluster 'lab' is saved: .*{place}"):
        saved.find_cluster("lab")


def test_changes_replace_and_add(project: Path) -> None:
    lab = saved.find_cluster("lab")
    changed = lab.merge_arguments({"n": 1, "env": {"MODE": "fast"}, "options": {"hosts": "node9"}})
    assert changed["n"] == 1 and changed["env"] == {"OMP_NUM_THREADS": 2, "MODE": "fast"}
    assert changed["options"] == {"template": "ssh {host} {cmd}", "hosts": "node9"}
    assert lab.merge_arguments({"kind": "kernel"}) == {
        "n": 3,
        "grace": 7,
        "env": lab.arguments["env"],
        "kind": "kernel",
    }
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
    assert saved.saved_cluster_names() == []
    with pytest.raises(ValueError, match=r"write \[tool\.rpcbench\.clusters\.lab\] with workers = 4 into pyproject"):
        saved.find_cluster("lab")


def test_names_are_offered_after_start() -> None:
    vocabulary = Vocabulary((), (), saved=("lab", "mine"))
    assert vocabulary.words_after("%cluster", ["start"])[:2] == ["lab", "mine"]
    assert "lab" not in vocabulary.words_after("%cluster", ["start", "lab"])


@pytest.mark.process
def test_a_saved_cluster_starts_with_changes(project: Path, no_leaks: None) -> None:
    with rpcbench.Cluster.saved("lab", n=1, launcher="local", env={"MODE": "fast"}) as made:
        code = "import os, torch\n(os.environ['MODE'], torch.get_num_threads())"
        assert made.run("worker1", code) == ("fast", 2) and made.workers == ["worker1"]
