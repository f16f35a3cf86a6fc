"""When a thread that waits looks again and again, and when it sleeps at once."""

import socket

import pytest

from rpcbench.transport.eager import _PAUSE, _TAKEN, MOMENT, Eager
from rpcbench.transport.watch import Watch


class Peer:
    """Answers after so many seconds by a clock of its own; each look takes a microsecond, or longer."""

    def __init__(self):
        self.now = self.due = 0.0
        self.looks = 0
        self.look_takes = 1e-6

    def there(self):
        self.looks += 1
        self.now += self.look_takes
        return self.now >= self.due

    def wait(self, eager, seconds):
        """Wait once as a thread does; whether it had to sleep."""
        self.due, self.looks = self.now + seconds, 0
        if eager.soon():
            return False
        self.now = max(self.now, self.due)
        eager.came()
        return True


@pytest.fixture
def peer():
    return Peer()


@pytest.fixture
def eager(peer):
    return Eager(peer.there, lambda: peer.now)


def test_a_short_wait_never_sleeps(peer, eager):
    assert not any(peer.wait(eager, MOMENT / 2) for _ in range(5))


def test_a_long_wait_is_looked_for_once_and_the_next_ones_not_at_all(peer, eager):
    assert peer.wait(eager, 3600)
    assert peer.looks > 1
    for _ in range(3):
        assert peer.wait(eager, 3600)
        assert peer.looks == 0


def test_a_look_lasts_a_moment(peer, eager):
    begun = peer.now
    peer.due = begun + 3600
    assert not eager.soon()
    assert MOMENT <= peer.now - begun < 2 * MOMENT


def test_after_a_short_wait_that_slept_it_looks_again(peer, eager):
    peer.wait(eager, 3600)
    assert peer.wait(eager, MOMENT / 2), "nobody could know"
    assert not peer.wait(eager, MOMENT / 2)


def test_where_others_want_the_core_it_sleeps_for_a_while(peer, eager):
    peer.look_takes = 2 * _TAKEN
    assert peer.wait(eager, MOMENT / 2)
    peer.look_takes = 1e-6
    assert [peer.wait(eager, MOMENT / 2) for _ in range(_PAUSE + 1)] == [True] * _PAUSE + [False]


def test_what_is_there_already_takes_one_look(peer, eager):
    assert not peer.wait(eager, 0)
    assert peer.looks == 1


@pytest.mark.parametrize(("said", "looks"), [(None, False), ("0", False), ("1", True)])
def test_nobody_looks_who_was_not_asked_to(said, looks, monkeypatch):
    monkeypatch.delenv("RPCBENCH_EAGER", raising=False)
    if said is not None:
        monkeypatch.setenv("RPCBENCH_EAGER", said)
    here, there = socket.socketpair()
    with here, there:
        watch = Watch(here)
        try:
            assert (watch.eager is not None) is looks
            there.send(b".")
            assert watch.readable(0.0, eager=True)
        finally:
            watch.close()
