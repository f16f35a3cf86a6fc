"""A cell on a worker asks the user, through a real kernel; and whatever ends a prompt leaves nothing hanging."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from worlds import PATIENCE

from rpcbench.base.conditions import Event
from rpcbench.cells import stdin

pytestmark = pytest.mark.process


@pytest.fixture
def usable(kernel):
    """The kernel; afterwards both workers still run cells."""
    yield kernel
    after = kernel.run("%%remote all\nprint('usable')")
    assert (after.status, sorted(after.text.splitlines())) == ("ok", ["[worker1] usable", "[worker2] usable"])


def test_a_cell_asks_and_goes_on_with_the_answer(usable):
    code = "%%remote worker1\nprint('before')\nname = input('Who? ')\nprint('hello', name)"
    reply = usable.run(code, answers=["Ada"])
    assert (reply.status, reply.text) == ("ok", "before\nhello Ada\n")
    assert reply.prompts == [("[worker1] Who? ", False)]


def test_a_password_is_asked_for_as_one(usable):
    reply = usable.run("%%remote worker1\nfrom getpass import getpass\nlen(getpass('Key: '))", answers=["secret"])
    assert (reply.results[0]["text/plain"], reply.prompts) == ("6", [("[worker1] Key: ", True)])


def test_several_workers_ask_one_after_the_other(usable):
    code = "%%remote all -o got\ngot = [input('first '), input('second ')]"
    reply = usable.run(code, answers=["a", "b", "c", "d"])
    assert reply.status == "ok", reply.traceback
    assert sorted(prompt for prompt, _ in reply.prompts) == [
        f"[worker{i}] {which} " for i in (1, 2) for which in ("first", "second")
    ]
    given = {prompt: text for (prompt, _), text in zip(reply.prompts, "abcd", strict=True)}
    texts = [[given[f"[worker{i}] {which} "] for which in ("first", "second")] for i in (1, 2)]
    assert usable.value("list(got.values())") == repr(texts)


def test_the_end_of_the_input_is_an_end_there_too(usable):
    reply = usable.run("%%remote worker1\ntry:\n    input()\nexcept EOFError:\n    print('over')", answers=["\x04"])
    assert (reply.status, reply.text) == ("ok", "over\n")


def test_the_stop_button_ends_a_prompt_and_the_cell_that_asks(usable):
    reply = usable.run("%%remote worker1\nanswer = input('stuck ')", answers=[usable.interrupt])
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    assert "----> 1 answer = input('stuck ')" in reply.traceback
    assert usable.run("%%remote worker1\ninput()", answers=["fine"]).results[0]["text/plain"] == "'fine'"


def test_after_the_stop_button_the_input_has_ended(usable):
    code = "%%remote worker1\ntry:\n    input('stuck ')\nexcept KeyboardInterrupt:\n    input('sure? ')"
    reply = usable.run(code, answers=[usable.interrupt])
    assert (reply.ename, len(reply.prompts)) == ("KeyboardInterrupt", 1)


def test_a_prompt_ends_with_the_time_of_its_cell(usable):
    reply = usable.run("%%remote worker1 --timeout 1\ninput('slow? ')", answers=[lambda: None])
    assert reply.ename == "RpcTimeoutError"


def test_a_prompt_ends_with_its_worker(usable):
    code = "%%remote worker1\nimport os, signal, threading\n"
    code += "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\ninput('dead? ')"
    reply = usable.run(code, answers=[lambda: None])
    assert (reply.status, reply.ename) == ("error", "WorkerLostError")
    assert usable.run("%cluster restart worker1").status == "ok"


def test_a_cell_beside_the_notebook_is_told_that_it_cannot_ask(usable):
    usable.run("%%remote worker1 --async\ninput('never ')")
    reply = usable.run("_.wait()")
    assert reply.ename == "StdinNotImplementedError"
    assert "leave --async out, or send the value along with -i" in reply.evalue


def test_a_front_end_without_input_is_named(usable):
    reply = usable.run("%%remote worker1\ninput('never ')", allow_stdin=False)
    assert (reply.ename, reply.prompts) == ("StdinNotImplementedError", [])
    assert "this frontend does not support input requests. Send the value along with -i." in reply.evalue


def test_a_call_has_nobody_to_ask(usable):
    reply = usable.run("cluster.rpc_sync('worker1', lambda: input('never '))")
    assert reply.ename == "StdinNotImplementedError"
    assert "input() outside a cell" in reply.evalue


def test_a_debugger_talks_through_the_prompt(usable):
    reply = usable.run("%%remote worker1\nx = 6\nbreakpoint()\nprint('on')", answers=["p x * 7", "c"])
    assert reply.status == "ok", reply.traceback
    assert "42\n" in reply.text
    assert [prompt for prompt, _ in reply.prompts] == ["[worker1] ipdb> ", "[worker1] ipdb> "]


def test_only_the_wait_that_is_meant_is_broken():
    waits = stdin._EndableWait()
    threading.Timer(0.2, waits.end_wait).start()
    assert waits.run_wait(lambda: time.sleep(PATIENCE)) is None
    waits.end_wait()  # it is over
    early = stdin._EndableWait()
    early.end_wait()
    assert early.run_wait(lambda: pytest.fail("nobody waits for the answer")) is None
    done = stdin._EndableWait()
    assert done.run_wait(lambda: "said") == "said"
    done.end_wait()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        stdin._EndableWait().run_wait(lambda: time.sleep(PATIENCE))


def test_waits_for_the_flag_and_no_longer_than_it_may():
    asking, flag = stdin.InputRequests(None), Event()
    assert not asking.prompt_until(flag, time.monotonic() + 0.05)
    threading.Timer(0.05, lambda: (flag.set(), asking.check_open_prompt())).start()
    assert asking.prompt_until(flag, time.monotonic() + PATIENCE)
