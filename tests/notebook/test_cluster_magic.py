"""`%cluster start` says what a machine lacks and how far it is; several clusters; a restart that runs cells again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpus import fake_gpus
from IPython.core.error import UsageError
from kinds import kernel_is_long

import rpcbench
from rpcbench.cells.targets import Targets
from rpcbench.launch import registry, status
from rpcbench.launch.base_cluster import running_clusters
from rpcbench.notebook import cluster_magic
from rpcbench.notebook.cluster_magic import Commands
from rpcbench.notebook.completion import Vocabulary
from rpcbench.notebook.parsers import cluster_line

GB = 1 << 30
HINT = re.compile(r"""hint: \["[^"]*", ("[^"]*"|'[^']*')\]""")


def test_the_words_on_a_cluster_name_its_lost_workers():
    there = SimpleNamespace(workers=["worker1"], lost=["worker2", "worker3"])
    assert cluster_magic.sentence(there) == "1 worker: worker1; lost: worker2, worker3."
    there.lost = []
    assert cluster_magic.sentence(there) == "1 worker: worker1."


def test_what_is_no_address_to_join_is_told_in_one_sentence():
    with pytest.raises(UsageError, match=r"^'localhost:29501' is not an address of workers; .*: tcp://HOST:PORT$"):
        Commands(Targets(), lambda found: None).run_action("join", ["localhost:29501"])


def test_the_status_as_json_is_json_where_no_cluster_runs_too():
    said = json.loads(Commands(Targets(), lambda found: None).run_action("status", ["--json"]))
    assert (said["format"], said["version"], said["workers"]) == ("rpcbench status", 1, [])


@pytest.fixture
def machine(monkeypatch):
    """A machine of two cores and one GB."""
    monkeypatch.setattr(status, "cores", lambda: 2)
    monkeypatch.setattr(status.psutil, "virtual_memory", lambda: SimpleNamespace(available=GB))


@pytest.mark.usefixtures("machine")
def test_what_a_machine_lacks_is_said_with_numbers():
    assert (status.describe_cores(2, "fork"), status.warn_of_memory(2, "fork")) == ("", "")
    assert status.describe_cores(3, "fork") == "3 workers on 2 cores: when all compute, they take turns."
    needs = "40 workers need about 12.6 GB of memory, and 1.1 GB are free: there is room for 3."
    assert status.warn_of_memory(40, "spawn") == needs


@pytest.mark.usefixtures("machine")
def test_no_room_at_all_is_said_too(monkeypatch):
    monkeypatch.setattr(status.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    needs = "1 worker needs about 62.9 MB of memory, and 1.0 MB are free: there is room for none."
    assert status.warn_of_memory(1, "fork") == needs


def test_workers_that_may_be_elsewhere_lack_nothing_here():
    assert (status.describe_cores(1000, "command"), status.warn_of_memory(1000, "command")) == ("", "")


@pytest.mark.parametrize("words", ["2 --launcher", "2 --launcher nope", "2 --launcher command template=x 3"])
def test_launchers_that_are_none_are_told_with_those_there_are(words):
    commands = Commands(Targets(), lambda cluster: None)
    with pytest.raises(UsageError, match="local, kernel, command" if words.count(" ") < 3 else "say how many"):
        commands.run_action("start", words.split())
    assert commands.started == []


def test_what_does_not_fit_a_launcher_is_a_mistake_of_usage(no_leaks):
    """In a notebook one sentence, and no frames of ours."""
    commands = Commands(Targets(), lambda cluster: None)
    with pytest.raises(UsageError, match=r"names a \{host\}: pass hosts="):
        commands.run_action("start", ["2", "--launcher", "command", "template=ssh {host} {cmd}"])
    assert commands.started == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("2 --gpus", "say which GPU each worker gets, or none: %cluster start 2 --gpus 0,1"),
        ("2 --gpus 0,7", "there is no GPU 7: this host has 0, 1, 2"),
        ("2 --gpus=1", "gpus=[1] has 1 GPU for 2 workers: name one for each"),
        ("2 --gpus 0,first", "'first' is not the number of a GPU"),
        ("2 --gpus 0,1 --launcher command template={cmd}", "the launcher 'command' assigns no GPUs; let its command"),
    ],
)
def test_a_mistake_about_gpus_is_one_sentence(tmp_path, no_leaks, words, sentence):
    commands = Commands(Targets(), lambda cluster: None)
    with fake_gpus(tmp_path, 3), pytest.raises(UsageError) as told:
        commands.run_action("start", words.split())
    assert sentence in str(told.value) and "\n" not in str(told.value)
    assert commands.started == []


def test_gpus_are_offered_as_many_as_workers(tmp_path):
    vocabulary = Vocabulary((), ())
    with fake_gpus(tmp_path, 3):
        assert vocabulary.words_after("%cluster", ["start", "2", "--gpus"]) == ["0,1", "none"]
        assert vocabulary.words_after("%cluster", ["start", "4", "--gpus"]) == ["none"]


@pytest.mark.process
def test_gpus_are_said_in_a_line_and_seen_in_the_status(tmp_path, no_leaks):
    commands = Commands(Targets(), lambda cluster: None)
    with fake_gpus(tmp_path, 3):
        try:
            commands.run_action("start", ["2", "--gpus", "2,1"])
            lines = repr(commands.run_action("status", [])).splitlines()
            assert "GPU memory" in lines[0] and "2 Fake 80GB" in lines[1] and "1 Fake 80GB" in lines[2]
            with pytest.raises(UsageError, match=r"gpus=\[2, 1\] has 2 GPUs for 3 workers"):
                commands.run_action("scale", ["3"])
        finally:
            commands.stop_started_clusters()


DIFFERENT = {
    "1 --kind kernel": "--launcher kernel (it has --launcher local)",
    "1 --launcher command template={cmd}": "--launcher command (it has --launcher local), template={cmd} (it has none)",
    "1 --env DEBUG=1": "--env DEBUG=1 (it has --env DEBUG=0)",
    "1 --env OTHER=1": "--env OTHER=1 (it has none)",
    "2 start=spawn": "start=spawn (it has none)",
    "1 --gpus none --grace 3": "--gpus none (it has none), --grace 3 (it has --grace 7)",
}
"""Words of `%cluster start`, and what they say that does not hold of the cluster that runs."""


@pytest.mark.process
def test_a_cluster_that_runs_is_not_taken_for_one_with_other_options(no_leaks):
    commands = Commands(Targets(), lambda cluster: None)
    try:
        same = "1 --env DEBUG=0 --grace 7"
        for words in (same, "1", "1 --kind process", "1 --launcher local", "1 --grace 7.0", same):
            assert "1 worker: worker1." in commands.run_action("start", words.split())
        for words, told in DIFFERENT.items():
            with pytest.raises(UsageError) as error:
                commands.run_action("start", words.split())
            assert str(error.value) == (
                f"the cluster that runs was not started with {told}: %cluster stop ends it, then start it again; or "
                "start another one beside it: --name other"
            )
    finally:
        commands.stop_started_clusters()


def test_options_from_files_and_python_are_compared_as_words_of_a_line():
    words = ["2", "--launcher", "ray", "cpus=0.5", "hosts=a,b", "--gpus", "0,1", "--python", "x", "--env", "N=2"]
    way = {}
    commands = Commands(None, None)
    commands.start_cluster = lambda size, asked, name: way.update(asked)
    commands.run_action("start", words)
    arguments = {"options": {"cpus": 0.5, "hosts": ["a", "b"], "python": "x"}, "gpus": [0, 1], "env": {"N": 2}}
    assert cluster_magic._describe_differences(way, SimpleNamespace(kind="ray", arguments=arguments)) == ""


def test_names_of_launchers_are_offered():
    vocabulary = Vocabulary((), ())
    assert "--launcher" in vocabulary.words_after("%cluster", ["start", "2"])
    assert vocabulary.words_after("%cluster", ["start", "2", "--launcher"]) == registry.launcher_names()


def test_each_action_can_be_run_and_has_a_help_text():
    lines = cluster_line().format_help().splitlines()
    for action in cluster_line().actions:
        assert callable(getattr(Commands, f"_{action}"))
        assert [line for line in lines if line.strip().startswith(action)]


def test_cores_are_counted():
    assert status.cores() >= 1


@pytest.mark.process
@kernel_is_long
def test_too_many_workers_are_warned_of_and_started_all_the_same(kernel):
    kernel.run("from rpcbench.launch import status\nreal, status.cores = status.cores, lambda: 2")
    try:
        reply = kernel.run("%cluster scale 3")
        said = next(content for kind, content in reply.outputs if kind == "stream")
        assert said["text"].startswith("3 workers on 2 cores: when all compute, they take turns.\n")
        assert said["name"] == "stdout", "red would say that it is a mistake"
        assert "3 workers: " in reply.text
        assert "cores" not in kernel.run("%cluster scale 2").text
    finally:
        kernel.run("status.cores = real")


@pytest.mark.process
@kernel_is_long
def test_clusters_stand_side_by_side_and_one_is_the_current(kernel):
    started = kernel.run("%cluster start 1 --name other")
    lines = [c["data"]["text/plain"] for kind, c in started.outputs if kind in ("display_data", "update_display_data")]
    assert lines[0].endswith("░ 0 of 1 workers ready") and lines[-1].endswith("█ 1 of 1 workers ready")
    assert len({c["transient"]["display_id"] for kind, c in started.outputs if "display" in kind}) == 1
    assert kernel.run("%cluster list").text.splitlines() == [
        "  main: 2 workers: worker1, worker2.", "* other: 1 worker: worker1."
    ]  # fmt: skip
    pids = kernel.value("%remote all __import__('os').getpid()")
    assert pids == kernel.value("{'worker1': cluster.pid('worker1')}").replace("{'worker1': ", "").rstrip("}")
    assert kernel.run("%cluster use main").text == "main: 2 workers: worker1, worker2.\n"
    assert kernel.run("%%remote all\nprint(1)").text.count("1\n") == 2
    assert kernel.value("__import__('rpcbench').cluster() is cluster, len(cluster.workers)") == "(True, 2)"
    assert "1 worker: worker1." in kernel.run("%cluster start 1 --name other").text, "twice is harmless"
    assert kernel.run("%cluster stop").text == (
        "other: The cluster is stopped. The current cluster is main: 2 workers: worker1, worker2.\n"
    )
    assert kernel.run("%cluster list").text == "* main: 2 workers: worker1, worker2.\n"
    assert "there are main" in kernel.run("%cluster use other").text
    assert "there are main" in kernel.run("%cluster stop other").text
    kernel.run("%cluster start 1 --name other\n%cluster use main")
    assert "other: The cluster is stopped. The current cluster is main: " in kernel.run("%cluster stop other").text
    assert "what to call it" in kernel.run("%cluster start 2 --name").text


@pytest.mark.process
@kernel_is_long
def test_a_restarted_worker_runs_its_cells_again_and_tells_what_failed(kernel):
    kernel.run("%cluster restart worker2\nstart = 20")
    kernel.run("%%remote worker2 -i start\nx = start + 1")
    kernel.run("%%remote worker2\nimport os\nassert os.environ.get('CHANGED') is None")
    kernel.run("%%remote worker2\nprint('seen once')\nx *= 2")
    assert kernel.run("%%remote worker2\nx = 'never'\n1 / 0").ename == "ZeroDivisionError"
    again = kernel.run("%cluster restart worker2 --replay")
    assert again.text == "Started again: worker2.\nworker2 has run its 3 cells again.\n"
    assert kernel.value("%remote worker2 x") == "42"
    kernel.run("import os\nos.environ['CHANGED'] = 'yes'")
    again = kernel.run("%cluster restart worker2 --replay")
    assert again.text.endswith("4 cells again; 1 failed:\n  import os …  ->  AssertionError: \n")
    assert kernel.value("%remote worker2 x") == "42"


def test_unloading_stops_what_was_started_here_and_nothing_else(monkeypatch):
    from rpcbench.notebook import cluster_magic

    def acted():
        agent = SimpleNamespace(running=True)
        return SimpleNamespace(agent=agent, workers=["w"], lost=[], over=False, prefer=lambda: None, stopped=[])

    own, other = acted(), acted()
    own.shutdown = lambda: own.stopped.append(True)
    current = [other]
    monkeypatch.setattr(cluster_magic, "cluster", lambda: current[-1])
    monkeypatch.setattr(cluster_magic, "running_clusters", lambda: {"main": other})
    monkeypatch.setattr(cluster_magic, "Cluster", lambda size, **options: own)
    made = Commands(None, lambda cluster: None)
    made.run_action("start", ["1", "--name", "mine"])
    current.append(own)
    assert made.run_action("list", []) == "  main: 1 worker: w.\n* mine: 1 worker: w."
    made.stop_started_clusters()
    assert (own.stopped, other.stopped) == ([True], [])


@pytest.mark.process
def test_clusters_made_in_python_have_names_too_and_keep_them():
    with rpcbench.Cluster(1) as first, rpcbench.Cluster(1) as second:
        assert running_clusters() == {"main": first, "cluster2": second}
        first.prefer()
        assert running_clusters() == {"main": first, "cluster2": second}
        assert Commands(None, print).running_clusters() == {"main": first, "cluster2": second}
        first.shutdown()
        assert running_clusters() == {"cluster2": second}


@pytest.mark.process
def test_a_cluster_has_its_name_before_its_workers_have_started():
    seen = []
    voice = cluster_magic.StartReports(lambda size: lambda *_: seen.append([*running_clusters()]), print, print)
    made = Commands(None, lambda cluster: None)
    try:
        made.start_cluster(1, name="a", voice=voice)
        assert seen and all(names == ["a"] for names in seen)
    finally:
        made.stop_started_clusters()


def test_the_code_of_empty_panels_runs_where_only_a_cluster_is() -> None:
    """A cluster that the sidebar has started is `cluster` in the notebook, and nothing was imported."""
    strings = (Path(__file__).parents[2] / "rpcbench/panels/strings.js").read_text()
    codes = [found[1:-1] for found in HINT.findall(strings)]
    calls = [code for code in codes if "cluster." in code and "make_" not in code]
    assert len(calls) == 3  # of progress, rrefs and messages; the others name what only the user has
    with rpcbench.Cluster(1) as cluster:
        for code in calls:
            exec(code, {"cluster": cluster})
