"""`input()` on a worker asks the notebook, and always ends."""

from __future__ import annotations

import builtins
import getpass
import json
import threading

import pytest
from IPython.core.error import StdinNotImplementedError
from worlds import PATIENCE

from rpcbench.cells.stdin import END, REFUSED, TEXT, Stdin


class Outbox:
    """A stream that records questions; each is answered with the next of `answers`."""

    def __init__(self, *answers, runs=True):
        self.answers, self.has_running_cell, self.asked = list(answers), runs, []
        self.stdin = Stdin(self)

    def send_item(self, kind, content):
        if self.has_running_cell:
            self.asked.append((kind, json.loads(content)))
            if self.answers:
                kind, text = self.answers.pop(0)
                notice = {"question": self.asked[-1][1]["question"], "kind": kind, "text": text}
                self.stdin.answer_received(0, notice)
        return self.has_running_cell


def test_input_and_getpass_ask_the_notebook_while_installed_and_are_then_restored():
    before = builtins.input, getpass.getpass
    output_stream = Outbox((TEXT, "yes"), (TEXT, "secret"))
    with output_stream.stdin.divert_input():
        assert (input("Sure? "), getpass.getpass(stream=None)) == ("yes", "secret")
    assert (builtins.input, getpass.getpass) == before
    assert [(a["prompt"], a["password"]) for _, a in output_stream.asked] == [("Sure? ", False), ("Password: ", True)]


@pytest.mark.parametrize(("kind", "error"), [(END, EOFError), (REFUSED, StdinNotImplementedError)])
def test_input_raises_if_its_question_is_ended_or_refused(kind, error):
    with pytest.raises(error, match=r"input\(\): "):
        Outbox((kind, "nobody is here")).stdin.input()


def test_getpass_outside_a_cell_raises():
    with pytest.raises(StdinNotImplementedError, match=r"getpass\(\) outside a cell.*pass the value as an argument"):
        Outbox(runs=False).stdin.getpass()


def test_an_answer_reaches_only_its_own_question():
    output_stream = Outbox()
    found = {}

    def ask(name):
        found[name] = output_stream.stdin.input(name)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    deadline = threading.Event()
    while len(output_stream.asked) < 2 and not deadline.wait(0.001):
        pass
    output_stream.stdin.answer_received(0, {"question": 17, "kind": TEXT, "text": "for nobody"})
    for _, asked in reversed(output_stream.asked):
        output_stream.stdin.answer_received(
            0, {"question": asked["question"], "kind": TEXT, "text": asked["prompt"] * 2}
        )
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {"a": "aa", "b": "bb"}


def test_input_on_a_thread_raises_eof_error_when_its_cell_ends():
    output_stream, ended = Outbox(), []

    def ask():
        with pytest.raises(EOFError):
            output_stream.stdin.input()
        ended.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    while not output_stream.asked:
        thread.join(0.001)
    output_stream.stdin.end_questions()
    thread.join(PATIENCE)
    assert ended == [True]
