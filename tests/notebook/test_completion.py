"""Tab and Shift-Tab in cells that run on workers, through a real kernel: the names are the worker's."""

from __future__ import annotations

import os
import signal
import time

import pytest
from worlds import PATIENCE, stop

from rpcbench.cells.shell import Names
from rpcbench.notebook.completion import Assist, RemoteCode, Vocabulary
from rpcbench.notebook.parsers import MagicParser, cluster_line, remote_line
from rpcbench.panels import ALL_PANELS

pytestmark = pytest.mark.process

THERE = """%%remote worker1
class Wagon:
    '''Rolls on rails.'''
    def roll_on(self, speed):
        return speed * 2
    axles_there = 4
wagon = Wagon()
"""


def until(wanted, ask, *args, **kwargs):
    """Ask until this is the answer: on a busy machine a worker may come too late with it."""
    deadline = time.monotonic() + PATIENCE
    while (found := ask(*args, **kwargs)) != wanted and time.monotonic() < deadline:
        pass
    assert found == wanted


def told(there, text, marked, detail=0):
    """Until Shift-Tab shows this."""
    until(True, lambda: text in there.inspect(marked, detail))


@pytest.fixture(scope="module")
def there(kernel):
    """A kernel whose worker1 has names that the notebook lacks, or has otherwise."""
    assert kernel.run(THERE).status == "ok"
    assert kernel.run("%%remote worker2\nwagon = 2").status == "ok"
    kernel.run("wagon = 'of the notebook'")
    return kernel


def test_names_are_those_of_the_worker(there):
    code = "%%remote worker1\nx = wagon.ro|\ny = 1"
    until((["roll_on"], "%%remote worker1\nx = wagon.roll_on\ny = 1"), there.complete, code)
    until((["bit_length"], "%%remote worker2\nwagon.bit_length"), there.complete, "%%remote worker2\nwagon.bit_l|")
    until((["capitalize"], "wagon.capitalize"), there.complete, "wagon.capitali|")


def test_offsets_count_characters_below_the_line_of_the_magic(there):
    code = "\n%%remote worker1 --timeout 9\nnäme = '😀'\nif 1:\n    wagon.ax| + 1"
    until((["axles_there"], code.replace("ax|", "axles_there")), there.complete, code)


def test_an_expression_on_a_line_too(there):
    code = "a = 1\nb = %remote worker1 wagon.axl|"
    until((["axles_there"], code.replace("axl|", "axles_there")), there.complete, code)


def test_what_it_is_is_told_by_the_worker(there):
    told(there, "Rolls on rails.", "%%remote worker1\nWagon|")
    told(there, "Signature: wagon.roll_on(speed)", "%%remote worker1\nwagon.roll_on(|)")
    told(there, "return speed * 2", "%%remote worker1\nwagon.roll_on|", detail=1)
    told(there, "int", "%%remote worker2\nwagon|")
    assert there.inspect("%%remote worker1\nnowhere_at_all|") == ""


def test_autoremote_sends_questions_along(there):
    there.run("%autoremote worker1")
    try:
        until((["roll_on"], "wagon.roll_on"), there.complete, "wagon.ro|")
        told(there, "Wagon", "1\nwagon|")
    finally:
        there.run("%autoremote off")
    assert there.complete("wagon.ro|")[0] == []


def test_a_busy_worker_answers(there, tmp_path):
    go = tmp_path / "go"
    busy = f"while not pathlib.Path({str(go)!r}).exists():\n    sum(range(1000))"
    there.run(f"%%remote worker1 --async\nimport pathlib\nprint('begun')\n{busy}")
    there.run("handle = _")
    try:
        until((["roll_on"], "%%remote worker1\nwagon.roll_on"), there.complete, "%%remote worker1\nwagon.ro|")
        told(there, "Rolls on rails.", "%%remote worker1\nWagon|")
    finally:
        go.touch()
    assert there.run("handle.wait()").status == "ok"


def test_a_worker_that_hangs_holds_nobody_up(there):
    pid = int(there.value("cluster.pid('worker1')"))
    there.run("wage_here = 1")
    until((["wage_here"], "wage_here"), there.complete, "wage|")  # loads what the notebook's own completer needs
    stop(pid)
    try:
        # IPython gives up looking after 0.4 s of a busy machine, so it is asked until it has found the name.
        until(["wage_here"], lambda: there.complete("%%remote worker1\nwage|", timeout=PATIENCE)[0])
    finally:
        os.kill(pid, signal.SIGCONT)
    until((["roll_on"], "%%remote worker1\nwagon.roll_on"), there.complete, "%%remote worker1\nwagon.ro|")


def test_a_worker_that_is_not_there_holds_nobody_up(there):
    there.run("wage_here = 1")
    until((["wage_here"], "%%remote worker9\nwage_here"), there.complete, "%%remote worker9\nwage|")


def test_the_line_of_a_magic_has_its_own_words(there):
    assert there.complete("%%remote wor|") == (["worker1", "worker2"], "%%remote worker1")
    assert there.complete("%%remote worker1 wor|\n1")[0] == ["worker2"]
    assert there.complete("%%remote worker1 --ti|\n1") == (["--timeout"], "%%remote worker1 --timeout\n1")
    assert there.complete("%%remote all -i code,x:s|\n1") == (["code,x:scatter"], "%%remote all -i code,x:scatter\n1")
    assert there.complete("x = 1\n%cluster sta|")[0] == ["start", "status", "stack"]
    assert there.complete("%cluster restart al|")[0] == ["all"]
    assert there.complete("%autoremote o|")[0] == ["off"]
    assert there.complete("%panel sh|")[0] == ["shards"]


def test_help_is_shown_in_the_pager_or_in_the_output(there):
    reply = there.run("%%remote worker1\nWagon?")
    (page,) = reply.payload
    assert page["source"] == "page"
    assert "Rolls on rails." in page["data"]["text/plain"]
    assert reply.outputs == []
    (page,) = there.run("%%remote worker1\nwagon.roll_on??").payload
    assert "return" in page["data"]["text/plain"]
    several = there.run("%%remote all\nwagon?")
    assert several.payload == []
    assert "[worker1]" in several.text
    assert "[worker2]" in several.text


def test_what_was_put_before_the_kernel_is_taken_away_again(there):
    own = "(get_ipython().kernel.do_complete.__qualname__, get_ipython().kernel.do_inspect.__qualname__)"
    assert there.value(own) == "('Assist.complete_code', 'Assist.inspect_name')"
    made = "from rpcbench.notebook.completion import Assist\nclass K:\n  do_complete = do_inspect = 7\nk = K()\n"
    there.run(made + "Assist(k, None, None, None).restore_kernel()")
    assert there.value("(k.do_complete, k.do_inspect)") == "(7, 7)"


class Kernel:
    do_complete = do_inspect = None


@pytest.mark.parametrize(
    ("marked", "spot"),
    [
        ("%%remote w\nab|c", RemoteCode("w", 11)),
        ("\n  %%remote w -o y\n|", RemoteCode("w -o y", 19)),
        ("%%remote w|\nabc", None),
        ("x\n%%remote w\nab|c", None),
        ("%remote w ab|c", RemoteCode("w", 10)),
        ("y = %remote w ab|c\nz", RemoteCode("w", 14)),
        ("%remote w abc\nz|", None),
        ("%remote w|", None),
        ("# %remote w ab|c", None),
        ("a.b|", None),
    ],
)
def test_where_code_goes(marked, spot):
    at = marked.index("|")
    where = Assist(Kernel(), str.strip, lambda code: None, lambda *_: []).find_remote_code(marked.replace("|", ""), at)
    assert where == spot


def test_all_goes_to_the_worker_that_is_switched_on():
    assist = Assist(Kernel(), str, lambda code: "w" if not code.startswith("%") else None, lambda *_: [])
    assert assist.find_remote_code("a.b", 3) == RemoteCode("w", 0)
    assert assist.find_remote_code("%time a.b", 3) is None


def options(line: MagicParser):
    return [argument.option_strings[0] for argument in line.arguments if argument.option_strings]


def test_words_of_a_line():
    words = Vocabulary(("worker1",), ("some",), ("main", "other"))
    assert words.words_after("%%remote", ["worker1", "-i"]) == []
    assert words.words_after("%%remote", ["worker1"]) == ["all", "some", *options(remote_line())]
    assert words.words_after("%%trace", ["worker1", "-i", "a"]) == ["all", "some", *options(remote_line())[1:]]
    assert words.words_after("%%profile", []) == [*words.words_after("%%remote", []), "--save", "--memory", "notebook"]
    assert words.words_after("%%remote", ["worker1", "-i"], "a,x:s") == ["a,x:scatter"]
    assert words.words_after("%%remote", ["worker1", "-o"], "y:") == ["y:cat", "y:stack", "y:list", "y:sum"]
    assert (
        words.words_after("%%remote", ["worker1", "-o"], "y") == words.words_after("%%remote", ["-o"], "y:cat:") == []
    )
    assert words.words_after("%remote", []) == ["worker1", "all", "some"]
    assert words.words_after("%remote", ["worker1"]) == []
    assert words.words_after("%cluster", []) == [*cluster_line().actions]
    assert words.words_after("%cluster", ["logs"]) == ["worker1", "all", "some"]
    assert words.words_after("%cluster", ["start", "2"]) == options(cluster_line().action("start"))
    assert words.words_after("%cluster", ["join", "tcp://localhost:29501"]) == ["--name"]
    assert words.words_after("%cluster", ["start", "2", "--kind"]) == ["process", "kernel"]
    assert words.words_after("%cluster", ["restart", "worker1"]) == ["all", "some", "--replay"]
    assert words.words_after("%cluster", ["use"]) == ["main", "other"]
    assert words.words_after("%cluster", ["use", "main"]) == []
    assert words.words_after("%cluster", ["stop"]) == ["main", "other"]
    assert words.words_after("%%step", ["worker1"]) == ["all", "some", "--hold", "--of"]
    assert words.words_after("%panel", []) == [*ALL_PANELS] and words.words_after("%panel", ["shards"]) == []
    assert words.words_after("%chaos", ["drop="]) == ["off", "duplicate=", "delay=", "seed=", "kill="]
    assert words.words_after("%autoremote", []) == ["worker1", "all", "some", "off"]


def test_a_question_that_cannot_begin_is_given_up():
    names = Names(None)
    with names._lock, pytest.raises(TimeoutError, match="another completion request"), names.exclusive_access():
        pass
