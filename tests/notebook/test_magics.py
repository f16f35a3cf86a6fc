"""Lines of magics become calls; mistakes in them become errors that say what to write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from rpcbench.notebook import magics
from rpcbench.notebook.cells import Answer, Ask
from rpcbench.notebook.tracebacks import Failed, interrupted, raised, shown_as


class Desk:
    """Answers every cell with what the test wants, and keeps what it was asked."""

    def __init__(self):
        self.agent = object()
        self.asked = []
        self.failures = []

    def run(self, screen, workers, code, ask):
        self.asked.append((workers, code, ask))
        values = {name: f"{name} of {{}}" for name in (*ask.want, *([""] if ask.value else []))}
        return Answer({w: {k: v.format(w) for k, v in values.items()} for w in workers}, self.failures)


@pytest.fixture
def shell():
    shell = SimpleNamespace(user_ns={"a": 1, "b": 2})
    shell.push = shell.user_ns.update
    return shell


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
def made(shell, desk, monkeypatch):
    """The magics in a notebook with a cluster of two."""
    running = SimpleNamespace(workers=["worker1", "worker2"], agent=desk.agent, pid=lambda name: 100)
    monkeypatch.setattr(magics, "cluster", lambda: running)
    found = magics.ClusterMagics(shell)
    found._desk = desk
    return found


def test_a_cell_goes_to_one_worker_with_variables_and_brings_one_back(made, desk, shell):
    made.remote("worker2 -i a,b -o y", "code")
    assert desk.asked == [(["worker2"], "code", Ask({"a": 1, "b": 2}, ("y",)))]
    assert shell.user_ns["y"] == "y of worker2"


@pytest.mark.parametrize("line", ["all", "worker1 worker2", "worker1,worker2", "worker1 all", "-o y worker1 worker2"])
def test_several_workers_are_named_in_many_ways_and_each_runs_the_cell_once(made, desk, line):
    made.remote(line, "code")
    assert [workers for workers, _, _ in desk.asked] == [["worker1", "worker2"]]


def test_from_several_workers_a_variable_comes_back_as_a_dict(made, shell):
    made.remote("all -o y", "code")
    assert shell.user_ns["y"] == {"worker1": "y of worker1", "worker2": "y of worker2"}


def test_a_line_is_a_value(made, desk):
    assert made.remote("worker1  {'k': 1}['k']") == " of worker1"
    assert made.remote("all x") == {"worker1": " of worker1", "worker2": " of worker2"}
    assert desk.asked[0] == (["worker1"], "{'k': 1}['k']", Ask(value=True))


@pytest.mark.parametrize(
    ("line", "cell", "complaint"),
    [
        ("worker1 -i nope", "code", "-i nope: this notebook has no such variable"),
        ("worker1 -i 3x", "code", "'3x' is not the name of a variable"),
        ("worker1 -o a.b", "code", "'a.b' is not the name of a variable"),
        ("", "code", "required: worker; usage: %%remote"),
        ("worker1 --what", "code", "unrecognized arguments: --what"),
        ("worker1", None, "%remote worker1 expression"),
    ],
)
def test_a_mistake_in_a_line_is_named_and_nothing_runs(made, desk, line, cell, complaint):
    with pytest.raises(UsageError, match=complaint):
        made.remote(line, cell)
    assert desk.asked == []


def test_all_of_none_is_an_error(made, desk):
    magics.cluster().workers.clear()
    with pytest.raises(RuntimeError, match="no worker is left"):
        made.remote("all", "code")


def test_values_are_kept_when_another_worker_fails(made, desk, shell):
    desk.failures = [Failed("worker2", KeyError("lost"), ["the remote line"], False)]
    with pytest.raises(KeyError) as caught:
        made.remote("all -o y", "code")
    assert caught.value._render_traceback_() == ["the remote line"]
    assert shell.user_ns["y"]["worker1"] == "y of worker1"


def test_starting_again_says_what_runs_and_how_to_change_it(made, capsys, shell):
    made.cluster("start 2")
    made.cluster("start 3")
    same, other = capsys.readouterr().out.splitlines()
    assert same.startswith("2 workers: worker1, worker2.")
    assert "cluster.scale(3)" in other
    assert shell.user_ns["cluster"].workers == ["worker1", "worker2"]
    made.cluster("")
    assert "worker2  process 100" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["start", "start 0", "start two", "begin"])
def test_a_wrong_cluster_line_is_refused(made, line):
    with pytest.raises(UsageError, match=r"%cluster start 2|usage: %cluster"):
        made.cluster(line)


def test_without_a_cluster_every_magic_says_how_to_start_one(made, monkeypatch, capsys):
    def none():
        raise RuntimeError("no cluster is running: %cluster start 2")

    monkeypatch.setattr(magics, "cluster", none)
    with pytest.raises(RuntimeError, match="%cluster start 2") as caught:
        made.remote("worker1", "code")
    assert caught.value._render_traceback_() == ["RuntimeError: no cluster is running: %cluster start 2"]
    made.cluster("status")
    made.cluster("stop")
    assert capsys.readouterr().out.count("No cluster runs") == 2


def test_magics_come_once_and_go_with_the_cluster_they_started(monkeypatch):
    warmed = []
    monkeypatch.setattr(magics.process, "warm", lambda: warmed.append(True))
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    magics.register(shell)
    first = shell.find_cell_magic("remote")
    magics.register(shell)
    assert shell.find_cell_magic("remote") == first
    assert warmed == [True]
    stopped = []
    first.__self__._started = SimpleNamespace(shutdown=lambda: stopped.append(True))
    magics.unregister(shell)
    assert stopped == [True]
    assert [shell.find_line_magic(name) for name in ("cluster", "remote", "panel")] == [None] * 3
    magics.unregister(shell)
    assert stopped == [True]


def test_failures_of_several_workers_are_told_once_each():
    failures = [
        Failed("worker1", ValueError("x"), ["one", "ValueError: x"], False),
        Failed("worker2", ValueError("x"), ["two", "ValueError: x"], False),
        Failed("worker3", KeyError("y"), ["three"], False),
    ]
    error = raised(failures, None)
    assert error is failures[0].error
    assert error._render_traceback_() == [
        "[worker1]", "one", "ValueError: x", "[worker2] ValueError: x", "[worker3]", "three"
    ]  # fmt: skip
    assert error.__notes__ == ["also on worker2: ValueError: x", "also on worker3: KeyError: 'y'"]


def test_an_interrupted_cell_shows_where_it_stood_and_who_still_runs():
    stood = [Failed("worker1", RuntimeError(), ["line 2", "KeyboardInterrupt: "], True)]
    assert isinstance(raised(stood, None), KeyboardInterrupt)
    assert interrupted(stood, [])._render_traceback_() == ["line 2", "KeyboardInterrupt: "]
    last = interrupted(stood, ["worker2"])._render_traceback_()[-1]
    assert "still runs on worker2; cluster.restart('worker2')" in last


def test_a_rendering_travels_with_its_error():
    import pickle

    assert pickle.loads(pickle.dumps(shown_as(ValueError("x"), ["line"])))._render_traceback_() == ["line"]
