"""What Ctrl-C may not cut in two: it is raised after the block, once, by the handler that was there."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from rpcbench.protocol.effects import Effects, Wake
from rpcbench.protocol.node import Node
from rpcbench.runtime import locked_node
from rpcbench.runtime.locked_node import LockedNode, uninterrupted


@pytest.fixture(autouse=True)
def handler() -> Iterator[list[int]]:
    """Numbers that a handler of the user's was called with; it raises, as Python's own does."""
    called: list[int] = []

    def handle(number: int, frame: object) -> None:
        called.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    yield called
    assert signal.signal(signal.SIGINT, before) is handle, "the user's handler was put back"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_when_all_is_done(handler: list[int]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        interrupt()
        with uninterrupted:
            interrupt()
        done.append(True)
    assert done and handler == [signal.SIGINT], "once, however often it came"
    with uninterrupted:
        pass
    assert handler == [signal.SIGINT], "and not again"


def test_it_comes_on_top_of_what_the_block_raised(handler: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted:
        interrupt()
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_who_insists_gets_out(monkeypatch: pytest.MonkeyPatch, handler: list[int]) -> None:
    monkeypatch.setattr(locked_node, "_PATIENCE", 0.0)
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted:
        interrupt()
        interrupt()
        raise AssertionError("not reached")
    assert caught.value.__context__ is None


def test_who_ignores_interrupts_goes_on_ignoring_them(handler: list[int]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted:
            interrupt()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert handler == []


def test_on_other_threads_it_changes_nothing(handler: list[int]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with uninterrupted:
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(20)
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with uninterrupted:
        leave.set()
        thread.join()
        assert signal.getsignal(signal.SIGINT) == uninterrupted._run, "its end does not end ours"


def test_the_default_action_is_taken_afterwards() -> None:
    script = """
import signal
from rpcbench.runtime.locked_node import uninterrupted
signal.signal(signal.SIGINT, signal.SIG_DFL)
with uninterrupted:
    signal.raise_signal(signal.SIGINT)
    print("held", flush=True)
print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "held\n")


def test_one_that_comes_as_the_block_begins_is_not_lost(monkeypatch: pytest.MonkeyPatch, handler: list[int]) -> None:
    set_signal = locked_node._signal_

    def quick(number: int, handle: Any) -> None:
        """Interrupts as soon as anything would hear of it."""
        set_signal(number, handle)
        if handle == uninterrupted._run:
            interrupt()

    monkeypatch.setattr(locked_node, "_signal_", quick)
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        done = True
    assert done and handler == [signal.SIGINT]


@pytest.mark.parametrize("inside", [False, True])
def test_an_event_of_the_machine_is_whole(inside: bool, handler: list[int]) -> None:
    done: list[str] = []

    def event(node: Node) -> Effects:
        interrupt()
        done.append("event")
        return [Wake()]

    machine = LockedNode(cast(Any, None), lambda effect, may_wait: done.append("effect"))
    with pytest.raises(KeyboardInterrupt), uninterrupted if inside else contextlib.nullcontext():
        machine.feed(event)
    assert done == ["event", "effect"] and handler == [signal.SIGINT]
