"""The words of `%cluster start` that become arguments of a cluster, saved ones among them; `%cluster stack`."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError
from worlds import PATIENCE

from rpcbench.cells.targets import Targets
from rpcbench.notebook import cluster_magic
from rpcbench.notebook.cluster_magic import Commands

SAVED = """
[clusters.lab]
workers = 3
launcher = "command"
hosts = ["node1", "node2"]
options = {template = "ssh {host} {cmd}"}
env = {MODE = "debug"}
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A function that runs the words of `%cluster start`, and returns the size, the arguments and the name of the
    cluster that it would start."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rpcbench.toml").write_text(SAVED)
    calls = []

    def make(size, progress, **way):
        calls.append((size, way))
        agent = SimpleNamespace(running=False)
        own = {"workers": ["worker1"], "lost": [], "over": False}
        return SimpleNamespace(agent=agent, **own, prefer=lambda: None, shutdown=lambda: None)

    monkeypatch.setattr(cluster_magic, "Cluster", make)
    monkeypatch.setattr(cluster_magic, "running", lambda: None)

    def start(words):
        commands = Commands(Targets(), lambda found: None)
        start.said = commands.run_action("start", words.split("|"))
        ((size, way),) = calls
        calls.clear()
        return size, way, *commands.named

    return start


def test_variables_may_stand_there_as_often_as_wanted(asked):
    assert asked("2|--env|A=1|--env=B=x=y") == (2, {"env": {"A": "1", "B": "x=y"}}, "main")
    assert asked("2|--python|/x/python|--grace|3") == (2, {"python": "/x/python", "grace": 3.0}, "main")


def test_a_cluster_is_kept_though_another_thread_lists_the_clusters_while_it_starts(monkeypatch):
    made = SimpleNamespace(
        agent=SimpleNamespace(running=True), workers=["worker1"], lost=[], over=False, prefer=lambda: None
    )

    def make(size, progress, **way):
        commands.run_action("list", [])
        return made

    monkeypatch.setattr(cluster_magic, "Cluster", make)
    monkeypatch.setattr(cluster_magic, "running", lambda: None)
    monkeypatch.setattr(cluster_magic, "sentence", lambda found: "1 worker: worker1.")
    commands = Commands(Targets(), lambda found: None)
    commands.run_action("start", ["1"])
    assert commands.started == [made] and commands.named == {"main": made}


def test_options_of_a_launcher_need_no_launcher_on_the_line(asked):
    assert asked("1|start=spawn") == (1, {"options": {"start": "spawn"}}, "main")


def test_a_saved_cluster_has_its_name_and_the_line_takes_its_place(asked, tmp_path):
    template = "ssh {host} {cmd}"
    assert asked("lab") == (
        3,
        {
            "launcher": "command", "env": {"MODE": "debug"},
            "options": {"template": template, "hosts": ["node1", "node2"]},
        },
        "lab",
    )  # fmt: skip
    assert asked.said.endswith(f" {tmp_path / 'rpcbench.toml'} describes lab."), "the file is named"
    size, way, name = asked("lab|1|--name|big|hosts=h9|--env|MODE=fast|--env|B=2")
    assert (size, name) == (1, "big") and way["env"] == {"MODE": "fast", "B": "2"}
    assert way["options"] == {"template": template, "hosts": "h9"}
    assert asked("lab|--kind|kernel")[1] == {"kind": "kernel", "env": {"MODE": "debug"}}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("2|--env", "say which variable workers get: %cluster start 2 --env OMP_NUM_THREADS=2"),
        ("2|--env|A", "say which variable workers get"),
        ("2|--env|=1", "say which variable workers get"),
        ("2|--python", "say which interpreter runs the workers: %cluster start 2 --python /path/of/venv/bin/python"),
        ("", "say how many workers to start: %cluster start 2; or the name of a saved cluster"),
        ("lab|few", "say how many workers to start"),
        ("-3", "say how many workers to start"),
        ("lba", "no cluster 'lba' is saved: did you mean lab? There are lab, in "),
    ],
)
def test_a_mistake_is_one_sentence(asked, words, sentence):
    with pytest.raises(UsageError) as told:
        asked(words)
    assert str(told.value).startswith(sentence) and "\n" not in str(told.value)


def test_mistakes_that_the_cluster_finds_are_sentences_too(tmp_path, no_leaks):
    commands = Commands(Targets(), lambda found: None)
    for words, sentence in (
        (["1", "--env", "RANK=1"], "the cluster itself sets RANK"),
        (["1", "--python", "/bin/true"], "does not run as a Python interpreter"),
        (["1", "--address", "10.0.0.1"], "are on this host and need none"),
    ):
        with pytest.raises(UsageError, match=sentence):
            commands.run_action("start", words)


@pytest.mark.process
def test_stacks_are_shown_while_a_cell_runs_in_the_background(kernel):
    begun = kernel.run("%%remote worker1 --async\nimport time\nwhile True:\n    time.sleep(0.01)\n")
    assert begun.status == "ok"
    kernel.run("handle = _")
    try:
        begins = "worker1:\n  runs the cell: import time …\n  MainThread runs\n      Cell worker1["
        idle = "\nworker2: nothing to do, and no thread waits\n"
        deadline, said = time.monotonic() + PATIENCE, ""
        while not (said.startswith(begins) and idle in said):  # the cell begins, and both workers reply in time
            assert time.monotonic() < deadline, said
            said = kernel.run("%cluster stack").text
    finally:
        kernel.run("handle.cancel()")
    assert "did you mean worker1" in kernel.run("%cluster stack wroker1").evalue
    assert kernel.complete("%cluster stack wor|")[0] == ["worker1", "worker2"]
