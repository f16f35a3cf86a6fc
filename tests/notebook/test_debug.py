"""Debuggers on a worker, through a real kernel: on the cell that failed last, and in one that runs."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.process

PROMPT = ("[worker1] ipdb> ", False)
FAILS = "%%remote worker1\ndef divide(n):\n    doubled = n * 2\n    return doubled / 0\nouter = 21\ndivide(outer)"


@pytest.fixture
def failed(kernel):
    """A kernel whose worker1 has run a cell that failed; afterwards both workers still run cells."""
    assert kernel.run(FAILS).ename == "ZeroDivisionError"
    yield kernel
    after = kernel.run("%%remote all\nprint('usable')")
    assert (after.status, sorted(after.text.splitlines())) == ("ok", ["[worker1] usable", "[worker2] usable"])


def test_where_no_cell_has_failed_that_is_said(kernel):
    assert kernel.run("%cluster restart worker2").status == "ok"  # other tests' cells have failed there
    assert "No cell has failed here yet" in kernel.run("%debug worker2").text
    assert kernel.run("%%remote worker2\nx = = 1").status == "error"
    assert "the last failed cell never began to run" in kernel.run("%debug worker2").text


def test_the_stack_of_the_failed_cell_can_be_looked_at(failed):
    reply = failed.run("%debug worker1", answers=["p doubled", "u", "p outer * 100", "u", "q"])
    assert (reply.status, reply.prompts) == ("ok", [PROMPT] * 5)
    assert "42\n" in reply.text
    assert "2100\n" in reply.text
    assert "*** Oldest frame" in reply.text, "no frame of the machinery is above the cell's"
    assert "rpcbench" not in reply.text


@pytest.mark.parametrize("end", [["nonsense("], ["p doubled"], []])
def test_the_stop_button_ends_it_and_the_failed_cell_stays_the_last_one(failed, end):
    reply = failed.run("%debug worker1", answers=[*end, failed.interrupt])
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    again = failed.run("%debug worker1", answers=["p doubled", "q"])
    assert (again.status, "42\n" in again.text) == ("ok", True)


def test_the_end_of_the_input_ends_it(failed):
    assert failed.run("%debug worker1", answers=["\x04"]).status == "ok"


def test_a_lost_worker_is_told(failed):
    assert failed.run("%%remote worker1\nimport os\nos.kill(os.getpid(), 9)").ename == "WorkerLostError"
    assert failed.run("%debug worker1").ename == "WorkerLostError"
    assert failed.run("%cluster restart worker1").status == "ok"


def test_without_a_worker_it_is_that_of_ipython(failed):
    failed.run("here = 6\n1 / 0")
    reply = failed.run("%debug", answers=["p here * 7", "q"])
    assert (reply.status, "42\n" in reply.text) == ("ok", True)
    assert [prompt for prompt, _ in reply.prompts] == ["ipdb> "] * 2
    reply = failed.run("%debug here + 1", answers=["c"])
    assert (reply.status, len(reply.prompts)) == ("ok", 1)
    reply = failed.run("%%debug\nhere + 1", answers=["c"])
    assert (reply.status, len(reply.prompts)) == ("ok", 1)


def test_while_all_cells_go_to_a_worker_both_ways_lead_there(failed):
    failed.run("%autoremote worker1")
    try:
        for line in ("%debug", "%debug worker1"):
            reply = failed.run(line, answers=["p doubled", "q"])
            assert (reply.status, reply.prompts) == ("ok", [PROMPT] * 2)
            assert "42\n" in reply.text
    finally:
        failed.run("%autoremote off")


def test_a_cell_stops_where_it_says(failed):
    code = "%%remote worker1\nfor i in range(3):\n    breakpoint()\nprint('thr' 'ough', i)"
    reply = failed.run(code, answers=["p i + 40", "c", "i = 9", "c", "c"])
    assert (reply.status, reply.prompts) == ("ok", [PROMPT] * 5)
    assert "40\n" in reply.text
    assert reply.text.endswith("through 2\n")


def test_pdb_opens_the_same_debugger_below_its_header(failed):
    code = "%%remote worker1\nimport pdb\nx = 41\npdb.set_trace(header='look at x')\nx += 1"
    reply = failed.run(code, answers=["p x", "c"])
    assert (reply.status, reply.prompts) == ("ok", [PROMPT] * 2)
    assert reply.text.startswith("look at x\n") and "41\n" in reply.text


def test_the_stop_button_at_a_breakpoint_ends_the_cell(failed):
    reply = failed.run("%%remote worker1\nx = 1\nbreakpoint()\nprint('went' ' on')", answers=[failed.interrupt])
    assert reply.ename == "KeyboardInterrupt"
    assert "went on" not in reply.text


@pytest.mark.parametrize("stop", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_the_stop_button_works_after_a_breakpoint(failed, stop):
    code = f"%%remote worker1\nimport time\n{stop}\nprint('went' ' on')\nwhile True:\n    time.sleep(0.01)"
    reply = failed.run(code, answers=["c"], stop_at=[["went on"]])
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    assert "still runs" not in reply.evalue
    sleeps = "%%remote worker1\nimport time\nprint('ready')\nwhile True:\n    time.sleep(0.01)"
    # "ready" is seen a moment before the worker is in its loop.
    assert re.search("----> (2 print|3 while|4     time)", failed.run(sleeps, stop_at=[["ready"]]).traceback)


def test_unloading_gives_the_magic_back(failed):
    unloaded = (
        "from rpcbench.notebook.fault_magics import DebugMagics\nshell = get_ipython()\n"
        "before = shell.find_line_magic('debug')\n"
        "made = DebugMagics(shell, bool, print)\nshell.register_magics(made)\nduring = shell.find_line_magic('debug')\n"
        "made.restore_debug_magic()\n"
        "(during == made.debug, shell.find_line_magic('debug') == before)"
    )
    assert failed.value(unloaded) == "(True, True)"
