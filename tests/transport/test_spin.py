"""When a waiting thread spins, and when it sleeps at once."""

from __future__ import annotations

import itertools
import os
import socket

import pytest

from rpcbench.transport.sockets import _FEWEST, _MOST, _TAKEN, SPIN_SECONDS, AdaptiveSpin, SocketWaiter


class Peer:
    """Sends data after some seconds of its own clock; each look takes a microsecond or more."""

    def __init__(self):
        self.now = self.due = 0.0
        self.looks = 0
        self.look_takes = 1e-6

    def ready(self):
        self.looks += 1
        self.now += self.look_takes
        return self.now >= self.due

    def slept(self, spin, seconds):
        """Wait once as a thread does; return whether it slept."""
        self.due, self.looks = self.now + seconds, 0

        def sleep():
            self.now = max(self.now, self.due)
            return True

        return spin.spin_then_sleep(sleep) is not None


@pytest.fixture
def peer():
    return Peer()


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.delenv("RPCBENCH_EAGER", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.fixture
def spin(peer):
    return AdaptiveSpin(peer.ready, lambda: peer.now)


def test_a_short_wait_spins_and_never_sleeps(peer, spin):
    assert not any(peer.slept(spin, SPIN_SECONDS / 2) for _ in range(5))


def test_the_first_long_wait_spins_and_the_next_ones_sleep_at_once(peer, spin):
    assert peer.slept(spin, 3600)
    assert peer.looks > 1
    for _ in range(3):
        assert peer.slept(spin, 3600)
        assert peer.looks == 0


def test_a_spin_lasts_about_the_spin_time(peer, spin):
    begun, woken = peer.now, []
    peer.due = begun + 3600
    spin.spin_then_sleep(lambda: woken.append(peer.now))
    assert SPIN_SECONDS <= woken[0] - begun < 2 * SPIN_SECONDS


def test_a_short_wait_that_slept_makes_the_next_one_spin(peer, spin):
    peer.slept(spin, 3600)
    assert peer.slept(spin, SPIN_SECONDS / 2), "the wait before was long"
    assert not peer.slept(spin, SPIN_SECONDS / 2)


def test_a_thread_on_a_busy_core_sleeps_for_the_next_waits(peer, spin):
    peer.look_takes = 2 * _TAKEN
    assert peer.slept(spin, SPIN_SECONDS / 2)
    peer.look_takes = 1e-6
    assert [peer.slept(spin, SPIN_SECONDS / 2) for _ in range(_FEWEST + 1)] == [True] * _FEWEST + [False]


def test_a_thread_on_a_busy_core_spins_more_and_more_rarely(peer, spin):
    peer.look_takes, waits = 2 * _TAKEN, []
    for number in range(4000):
        peer.slept(spin, SPIN_SECONDS / 2)
        if peer.looks:
            waits.append(number)
    between = [later - sooner - 1 for sooner, later in itertools.pairwise(waits)]
    assert between[:3] == [_FEWEST, 2 * _FEWEST, 4 * _FEWEST] and between[-1] == between[-2] == _MOST


def test_a_wait_for_present_data_takes_one_look(peer, spin):
    assert not peer.slept(spin, 0)
    assert peer.looks == 1


@pytest.mark.parametrize("why", ["RPCBENCH_EAGER", "one core"])
def test_a_thread_does_not_spin_on_one_core_or_if_the_user_has_switched_it_off(peer, why, monkeypatch):
    if why == "one core":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    else:
        monkeypatch.setenv(why, "0")
    spin = AdaptiveSpin(peer.ready, lambda: peer.now)
    assert [peer.slept(spin, SPIN_SECONDS / 2) for _ in range(3)] == [True] * 3
    assert peer.looks == 0


def test_a_socket_waiter_wakes_once_and_only_while_it_is_armed():
    here, there = socket.socketpair()
    with here, there:
        watch = SocketWaiter(here)
        try:
            assert not watch.ready() and not watch.poll_readable(0.0)
            there.send(b".")
            assert watch.ready() and watch.poll_readable(0.0)
            assert watch._armed.poll(0) == []
            watch.arm_wakeup()
            watch.wait_for_event()
            assert watch._armed.poll(0) == [], "it wakes once"
            watch.arm_wakeup()
            watch.disarm_wakeup()
            assert watch._armed.poll(0) == []
        finally:
            watch.close()
