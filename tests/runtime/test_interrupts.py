"""Blocks that Ctrl-C does not interrupt: it is raised after the block, once, by the handler of the user."""

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
    """The signals that a handler of the user was called with; it raises, as the default one does."""
    called: list[int] = []

    def handle(number: int, frame: object) -> None:
        called.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    yield called
    assert signal.signal(signal.SIGINT, before) is handle, "the handler of the user is restored"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_block_is_raised_once_after_the_block(handler: list[int]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        interrupt()
        with uninterrupted:
            interrupt()
        done.append(True)
    assert done and handler == [signal.SIGINT], "the handler runs once for several interrupts"
    with uninterrupted:
        pass
    assert handler == [signal.SIGINT], "the handler does not run again"


def test_an_interrupt_has_the_error_of_the_block_as_context(handler: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted:
        interrupt()
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_a_second_interrupt_after_the_patience_ends_the_block(
    monkeypatch: pytest.MonkeyPatch, handler: list[int]
) -> None:
    monkeypatch.setattr(locked_node, "_PATIENCE", 0.0)
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted:
        interrupt()
        interrupt()
        raise AssertionError("not reached")
    assert caught.value.__context__ is None


def test_a_process_that_ignores_interrupts_still_ignores_them_in_a_block(handler: list[int]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted:
            interrupt()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert handler == []


def test_a_block_on_another_thread_delays_no_interrupt(handler: list[int]) -> None:
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
        assert signal.getsignal(signal.SIGINT) == uninterrupted._handle_interrupt, (
            "the end of that block does not end this one"
        )


def test_the_default_action_of_a_signal_is_taken_after_the_block() -> None:
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


def test_an_interrupt_at_the_start_of_a_block_is_not_lost(monkeypatch: pytest.MonkeyPatch, handler: list[int]) -> None:
    set_signal = locked_node._signal_

    def quick(number: int, handle: Any) -> None:
        """Interrupt as soon as the handler of the block is set."""
        set_signal(number, handle)
        if handle == uninterrupted._handle_interrupt:
            interrupt()

    monkeypatch.setattr(locked_node, "_signal_", quick)
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        done = True
    assert done and handler == [signal.SIGINT]


@pytest.mark.parametrize("inside", [False, True])
def test_an_interrupt_does_not_split_an_event_of_the_node_from_its_effects(inside: bool, handler: list[int]) -> None:
    done: list[str] = []

    def event(node: Node) -> Effects:
        interrupt()
        done.append("event")
        return [Wake()]

    machine = LockedNode(cast(Any, None), lambda effect, may_wait: done.append("effect"))
    with pytest.raises(KeyboardInterrupt), uninterrupted if inside else contextlib.nullcontext():
        machine.feed_event(event)
    assert done == ["event", "effect"] and handler == [signal.SIGINT]
