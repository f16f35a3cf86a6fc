"""Lines of magics become calls; mistakes in them become errors that say what to write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import rpcbench
from rpcbench.cells.client import CellInputs, CellOptions, CellResult
from rpcbench.cells.history import Rerun
from rpcbench.cells.tracebacks import Failed, combined_error, interrupt_error, with_rendering
from rpcbench.launch.status import ClusterStatus, WorkerStatus
from rpcbench.notebook import cluster_magic, magics
from rpcbench.notebook.parsers import cluster_line, step_line


class Desk:
    """Answers every cell with what the test wants, and keeps what it was asked."""

    def __init__(self):
        self.agent = SimpleNamespace(part=lambda kind: self, running=True)
        self.asked = []
        self.failures = []

    def run(self, screen, workers, code, ask, way):
        self.asked.append((workers, code, ask))
        self.way = way
        values = {name: f"{name} of {{}}" for name in (*ask.want, *ask.leave, *([""] if ask.value else []))}
        return CellResult({w: {k: v.format(w) for k, v in values.items()} for w in workers}, self.failures)


class Running:
    """A cluster of two, which notes what is done to it."""

    def __init__(self, agent):
        self.agent = agent
        self.kind, self.arguments, self.workers, self.lost = "process", {}, ["worker1", "worker2"], []
        self.inseparable, self.farewell, self.over = "", "The cluster is stopped.", False
        self.done, self.replayed = [], []

    def prefer(self):
        self.done.append(("prefer", ""))

    def status(self):
        lost = WorkerStatus("worker3", 103, "killed by SIGKILL", 0, "here", 0.0, None, 0.0, 0)
        return ClusterStatus([*(_serves(name) for name in self.workers), lost])

    def scale(self, n):
        self.workers = [f"worker{i}" for i in range(1, n + 1)]

    def restart(self, name, replay):
        self.done.append(("restart", name))
        return self.replayed if replay else []

    def reload(self, *modules):
        self.done += [("reload", module) for module in modules]

    def interrupt(self, name):
        self.done.append(("interrupt", name))

    def log(self, name):
        return "first\nlast" if name == "worker1" else ""


def _serves(name):
    return WorkerStatus(name, 100, "ready", 1, "here", 75.2, 15 << 20, 0.5, 2)


@pytest.fixture
def shell():
    shell = SimpleNamespace(user_ns={"a": 1, "b": 2, "one": [1]})
    shell.push, shell.var_expand = shell.user_ns.update, lambda line, depth: line
    return shell


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
def made(shell, desk, monkeypatch):
    """The magics in a notebook with a cluster of two."""
    running = Running(desk.agent)
    monkeypatch.setattr(magics, "cluster", lambda: running)
    monkeypatch.setattr(cluster_magic, "cluster", lambda: running)
    return magics.ClusterMagics(shell)


def test_a_cell_goes_to_one_worker_with_variables_and_brings_one_back(made, desk, shell):
    made.remote("worker2 -i a,b -o y", "code")
    assert desk.asked == [(["worker2"], "code", CellInputs({"a": 1, "b": 2}, ("y",)))]
    assert shell.user_ns["y"] == "y of worker2"


def test_an_option_with_a_list_may_stand_several_times(made, desk):
    made.remote("worker2 -i a -i b,one -o y --rref v -o z --rref w", "code")
    assert desk.asked == [(["worker2"], "code", CellInputs({"a": 1, "b": 2, "one": [1]}, ("y", "z"), leave=("v", "w")))]
    made.remote("worker2 -i a", "code")
    assert desk.asked[1][2] == CellInputs({"a": 1}), "the next line begins anew"


def test_lists_of_other_magics_may_stand_several_times():
    step = step_line().parse(["--hold", "Call", "--of", "worker1", "--hold", "Result,Call", "--of", "worker2"])
    assert (step.hold, step.of) == (["Call", "Result", "Call"], ["worker1", "worker2"])
    start = cluster_line().action("start").parse(["2", "--gpus", "0", "--env", "A=1", "--gpus", "1,2", "--env", "B=2"])
    assert (start.gpus, start.env) == ("0,1,2", [("A", "1"), ("B", "2")])


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
    assert desk.asked[0] == (["worker1"], "{'k': 1}['k']", CellInputs(value=True))


def test_each_worker_gets_its_part_and_uneven_ones_are_told(made, desk, shell, capsys):
    shell.user_ns["x"] = [1, 2, 3]
    made.remote("all -i a,x:scatter", "code")
    made.remote("worker2 -i x:scatter", "code")
    first, second = {"worker1": {"x": [1, 2]}, "worker2": {"x": [3]}}, {"worker2": {"x": [1, 2, 3]}}
    assert [ask for _, _, ask in desk.asked] == [CellInputs({"a": 1}, own=first), CellInputs(own=second)]
    assert capsys.readouterr().out == "x: 3 rows as 2, 1\n"


def test_a_part_is_cut_along_a_dimension(made, desk, shell):
    shell.user_ns["x"] = torch.arange(6).reshape(2, 3)
    made.remote("worker1 worker2 worker3 -i x:scatter:-1", "code")
    assert [part["x"].tolist() for part in desk.asked[0][2].own.values()] == [[[0], [3]], [[1], [4]], [[2], [5]]]


@pytest.mark.parametrize(
    ("how", "value"),
    [("list", ["y of worker1", "y of worker2"]), *dict.fromkeys(["cat", "cat:0"], "y of worker1y of worker2").items()],
)
def test_values_of_all_workers_come_back_as_one(made, desk, shell, how, value):
    made.remote(f"all -o z,y:{how}", "code")
    assert desk.asked[0][2].want == ("z", "y")
    assert (shell.user_ns["y"], shell.user_ns["z"]["worker2"]) == (value, "z of worker2")


def test_values_that_do_not_fit_are_named_and_kept_by_worker(made, shell):
    with pytest.raises(UsageError, match="-o y:sum: y cannot be added up: worker1 has str, worker2 has str"):
        made.remote("all -o y:sum", "code")
    assert shell.user_ns["y"] == {"worker1": "y of worker1", "worker2": "y of worker2"}


def test_values_are_not_joined_when_a_worker_has_failed(made, desk, shell):
    desk.failures = [Failed("worker2", KeyError("lost"), ["the remote line"], False)]
    with pytest.raises(KeyError):
        made.remote("all -o y:cat", "code")
    assert shell.user_ns["y"]["worker1"] == "y of worker1"


@pytest.mark.parametrize(
    ("line", "cell", "complaint"),
    [
        ("all -i a:scatter", "code", "-i a:scatter: a has type int: only a tensor, an array or a sequence"),
        ("all -i one:scatter", "code", "-i one:scatter: one has 1 row, and there are 2 workers: name fewer workers"),
        ("all -i one:scatter:1", "code", "-i one:scatter: one has type list, without a dimension 1"),
        ("all -i nope:scatter", "code", "-i nope:scatter: this notebook has no such variable"),
        ("all -i a:cat", "code", "a:cat: there is no way 'cat' to transfer a variable here: .*scatter"),
        ("all -o y:scatter", "code", "y:scatter: there is no way 'scatter' .*cat, stack, list, sum"),
        ("all -o y:ct", "code", "y:ct: there is no way 'ct' .*did you mean cat"),
        ("all -o y:cat:", "code", "y:cat:: after cat comes at most one dimension, as in y:cat:1"),
        ("all -o y:cat:0:1", "code", "after cat comes at most one dimension"),
        ("all --rref y:cat", "code", "'y:cat' is not the name of a variable"),
        ("worker1 -i nope", "code", "-i nope: this notebook has no such variable"),
        ("worker1 -i 3x", "code", "'3x' is not the name of a variable"),
        ("worker1 -o a.b", "code", "'a.b' is not the name of a variable"),
        ("", "code", "required: WORKER; usage: %%remote"),
        ("worker1 --what", "code", "%%remote has no option --what: did you mean --tabs\\? There are -i"),
        ("worker1 --timeout 0", "code", "--timeout 0: say a number of seconds"),
        ("worker1 --timeout soon", "code", "--timeout soon: say a number of seconds"),
        ("[x]", "code", r"\[x\] is no slice"),
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
    assert "%cluster scale 3" in other
    assert shell.user_ns["cluster"].workers == ["worker1", "worker2"]


@pytest.mark.parametrize(
    "line",
    ["start", "start 0", "start 2 3", "begin", "stop now", "status of", "scale", "restart", "group rest"],
)
def test_a_wrong_cluster_line_is_refused(made, line):
    with pytest.raises(UsageError, match="%cluster"):
        made.cluster(line)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("start 2 --knid kernel", "has no option --knid: did you mean --kind\\?"),
        ("start 2 --kinds=kernel", "has no option --kinds: did you mean --kind\\?"),
        ("scale 3 --name b", "%cluster scale has no option --name: there are none"),
        ("restrat worker1", "%cluster restrat: did you mean restart\\?"),
    ],
)
def test_the_nearest_action_or_option_is_named(made, line, complaint):
    with pytest.raises(UsageError, match=complaint):
        made.cluster(line)


@pytest.mark.parametrize("line", ["help", "--help", "start --help", "-h"])
def test_help_shows_what_there_is_and_runs_nothing(made, desk, capsys, line):
    made.cluster(line)
    assert "%cluster start 2" in capsys.readouterr().out
    made.remote(line, "cell")
    assert "--collapse" in capsys.readouterr().out
    assert desk.asked == []


def test_the_help_of_an_action_has_its_options(made, capsys):
    made.cluster("start --help")
    assert "--patience SECONDS" in capsys.readouterr().out


def test_a_value_may_follow_an_equals_sign(made):
    with pytest.raises(UsageError, match="process or kernel: %cluster start 2 --kind kernel"):
        made.cluster("start 2 --kind=thread")


@pytest.mark.parametrize("line", ["start 2 --kind", "start 2 --kind thread"])
def test_a_wrong_kind_of_worker_is_refused(made, line):
    with pytest.raises(UsageError, match="process or kernel: %cluster start 2 --kind kernel"):
        made.cluster(line)


def test_the_state_of_each_worker_is_a_table(made, monkeypatch):
    shown = []
    monkeypatch.setattr(magics, "display", shown.append)
    made.cluster("")
    made.cluster("status")
    assert shown == [magics.cluster().status()] * 2
    head, first, _, lost = repr(shown[0]).splitlines()
    assert head.split() == ["worker", "process", "state", "start", "host", "up", "memory", "cpu", "calls"]
    assert first.split("  ")[0] == "worker1" and "1 min 15 s" in first and "15.7 MB" in first and "50 %" in first
    assert "killed by SIGKILL" in lost and "?" in lost


def test_names_in_the_table_are_text():
    row = _serves("<img onerror=x>")
    assert "<img" not in ClusterStatus([row])._repr_html_() and "&lt;img" in ClusterStatus([row])._repr_html_()


def test_workers_are_changed_by_a_line(made, capsys):
    made.cluster("scale 3")
    assert capsys.readouterr().out.endswith("3 workers: worker1, worker2, worker3.\n")  # after a word on shared cores
    made.cluster("restart worker2,worker3")
    made.cluster("interrupt")
    made.cluster("interrupt [0]")
    done = magics.cluster().done
    assert done[:2] == [("restart", "worker2"), ("restart", "worker3")]
    assert done[2:] == [("interrupt", name) for name in ("worker1", "worker2", "worker3", "worker1")]


def test_modules_are_loaded_anew_by_a_line(made, capsys):
    made.cluster("reload helpers models.layers")
    assert magics.cluster().done == [("reload", "helpers"), ("reload", "models.layers")]
    assert capsys.readouterr().out == "Reloaded: helpers, models.layers, here and on worker1, worker2.\n"
    with pytest.raises(UsageError, match="%cluster reload helpers"):
        made.cluster("reload")


def test_a_restart_tells_what_was_run_again_and_what_failed(made, capsys):
    made.cluster("restart worker2")
    made.cluster("restart worker2 --replay")
    magics.cluster().replayed = [Rerun("x = 1", None)]
    made.cluster("restart --replay worker2")
    magics.cluster().replayed = [Rerun("x = 1", None), Rerun("y = x\nz", NameError("z")), Rerun("a" * 70, KeyError(1))]
    made.cluster("restart worker2 --replay")
    assert capsys.readouterr().out.splitlines() == [
        "Started again: worker2. Its variables are lost.",
        "Started again: worker2.", "worker2 had run no cell.",
        "Started again: worker2.", "worker2 has run its 1 cell again.",
        "Started again: worker2.", "worker2 has run its 3 cells again; 2 failed:",
        "  y = x …  ->  NameError: z",
        f"  {'a' * 60} …  ->  KeyError: 1",
    ]  # fmt: skip


def test_logs_are_told_by_worker_also_of_one_that_is_lost(made, capsys):
    made.cluster("logs")
    assert capsys.readouterr().out.splitlines() == [
        "[worker1] first", "[worker1] last", *(f"[worker{n}] (nothing outside cells)" for n in (2, 3))
    ]  # fmt: skip
    made.cluster("logs worker1")
    assert capsys.readouterr().out.splitlines() == ["[worker1] first", "[worker1] last"]


@pytest.mark.parametrize(
    ("line", "told"), [("all", True), ("[0]", True), ("worker1", False), ("worker1 worker2", False)]
)
def test_a_cell_that_may_have_been_meant_for_a_lost_worker_says_so(made, capsys, line, told):
    magics.cluster().lost = ["worker3"]
    made.remote(line, "code")
    said = "Not on worker3, which is lost: %cluster restart worker3 starts it again.\n"
    assert capsys.readouterr().err == (said if told else "")
    magics.cluster().lost = []
    made.remote(line, "code")
    assert capsys.readouterr().err == ""


def test_a_group_is_saved_and_follows_who_comes(made, desk, capsys):
    made.cluster("group")
    made.cluster("group rest [1:]")
    made.cluster("group")
    assert capsys.readouterr().out.splitlines() == [
        "No group is saved.", "rest: worker2. %%remote rest runs a cell there.", "rest: [1:]"
    ]  # fmt: skip
    made.remote("rest", "code")
    made.cluster("scale 4")
    made.remote("rest", "code")
    assert [workers for workers, _, _ in desk.asked] == [["worker2"], ["worker2", "worker3", "worker4"]]


def test_options_of_a_cell(made, desk, shell):
    made.remote("worker1 --rref y --timeout 2.5 --label", "code")
    assert desk.asked == [(["worker1"], "code", CellInputs(leave=("y",)))] and desk.way == CellOptions(2.5, True)
    assert shell.user_ns["y"] == "y of worker1"


def test_a_cell_may_run_here_too_after_it_has_run_there(made, desk, shell):
    ran = []
    shell.run_cell = lambda cell: (ran.append((cell, len(desk.asked))), NOTHING_WRONG)[1]
    made.remote("all --local", "code")
    assert ran == [("code", 1)]
    shell.run_cell = lambda cell: SimpleNamespace(error_before_exec=None, error_in_exec=KeyError("here"))
    with pytest.raises(KeyError, match="here") as caught:
        made.remote("all --local", "code")
    assert caught.value._render_traceback_() == [], "it has been shown already"


NOTHING_WRONG = SimpleNamespace(error_before_exec=None, error_in_exec=None)


def test_cells_go_to_a_worker_until_that_is_switched_off(made, capsys):
    made.auto(["x = 1\n"])
    agent = SimpleNamespace(member=lambda name: {"worker1": 1, "worker2": 2}[name])
    magics.cluster().agent = agent
    made.autoremote("")
    made.autoremote("worker2")
    assert made.auto(["\n", "x = 1\n"]) == ["%%remote --label worker2\n", "\n", "x = 1\n"]
    for own in ("%%time\n", "%cluster status\n", "%chaos off\n", "%autoremote off\n", "%remote worker1 x\n", "\n"):
        assert made.auto([own]) == [own]
    with made.auto.pause_remote_cells():
        assert made.auto(["x = 1\n"]) == ["x = 1\n"]
    made.autoremote("")
    with pytest.raises(KeyError):
        made.autoremote("worker9")
    made.autoremote("off")
    assert made.auto(["x = 1\n"]) == ["x = 1\n"]
    assert capsys.readouterr().out.splitlines() == [
        "Cells run here, in the notebook.",
        "Cells run on worker2 until %autoremote off.",
        "Cells run on worker2.",
        "Cells run here again, in the notebook.",
    ]


def test_without_a_cluster_every_magic_says_how_to_start_one(made, monkeypatch, capsys):
    def none():
        raise RuntimeError("no cluster is running: %cluster start 2")

    monkeypatch.setattr(magics, "cluster", none)
    monkeypatch.setattr(cluster_magic, "cluster", none)
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
    own = SimpleNamespace(do_complete=1, do_inspect=2), shell.find_line_magic("debug"), shell.find_cell_magic("debug")
    shell.kernel, shows = SimpleNamespace(do_complete=1, do_inspect=2), shell.showtraceback
    magics.register(shell)
    assert shell.showtraceback != shows
    assert own[0] != shell.kernel
    assert shell.find_line_magic("debug") != own[1]
    first = shell.find_cell_magic("remote")
    magics.register(shell)
    assert shell.find_cell_magic("remote") == first
    assert warmed == [True]
    stopped = []
    first.__self__.commands.started.append(SimpleNamespace(shutdown=lambda: stopped.append(True)))
    magics.unregister(shell)
    assert stopped == [True]
    assert [shell.find_line_magic(name) for name in ("cluster", "remote", "autoremote", "panel")] == [None] * 4
    assert first.__self__.auto not in shell.input_transformers_cleanup
    assert (shell.kernel, shell.find_line_magic("debug"), shell.find_cell_magic("debug")) == own
    assert shell.showtraceback == shows
    magics.unregister(shell)
    assert stopped == [True]


def test_failures_of_several_workers_are_told_once_each():
    failures = [
        Failed("worker1", ValueError("x"), ["one", "ValueError: x"], False),
        Failed("worker2", ValueError("x"), ["two", "ValueError: x"], False),
        Failed("worker3", KeyError("y"), ["three"], False),
    ]
    error = combined_error(failures, None)
    assert error is failures[0].error
    assert error._render_traceback_() == [
        "[worker1]", "one", "ValueError: x", "[worker2] ValueError: x", "[worker3]", "three"
    ]  # fmt: skip
    assert error.__notes__ == ["also on worker2: ValueError: x", "also on worker3: KeyError: 'y'"]


def test_an_interrupted_cell_shows_where_it_stood_and_who_still_runs():
    stood = [Failed("worker1", RuntimeError(), ["line 2", "KeyboardInterrupt: "], True)]
    assert isinstance(combined_error(stood, None), KeyboardInterrupt)
    assert interrupt_error(stood, [])._render_traceback_() == ["line 2", "KeyboardInterrupt: "]
    assert interrupt_error([], [])._render_traceback_() == ["KeyboardInterrupt: the cell was interrupted"]
    last = interrupt_error(stood, ["worker2"])._render_traceback_()[-1]
    assert last == (
        "KeyboardInterrupt: the cell had not ended yet on worker2: `%cluster status` says whether it still runs, "
        "and only then cluster.restart('worker2') would end it"
    )


def test_a_rendering_travels_with_its_error():
    import pickle

    assert pickle.loads(pickle.dumps(with_rendering(ValueError("x"), ["line"])))._render_traceback_() == ["line"]


def test_loading_binds_the_package_unless_its_name_is_taken(monkeypatch):
    monkeypatch.setattr(magics, "register", lambda shell: None)
    for names, bound in (({}, rpcbench), ({"rpcbench": "mine"}, "mine")):
        rpcbench.load_ipython_extension(SimpleNamespace(user_ns=names))
        assert names == {"rpcbench": bound}
