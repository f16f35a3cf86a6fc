"""Who counts as alive, by what is heard of him: no clock, no socket."""

from __future__ import annotations

from rpcbench.protocol.membership import FailureDetector, SignsOfLife, Verdict

PEER = 3


class Watch:
    """Runs a `FailureDetector` of 3, 5 and 60 seconds from tick to tick."""

    def __init__(self) -> None:
        self.life = FailureDetector(3.0, 5.0, 60.0)
        self.now = 1000.0
        self.told: list[tuple[float, str]] = []

    def run(self, seconds: float, heard: int, acknowledged: float | None = None) -> None:
        """Let time pass while nothing more than `heard` bytes come."""
        end = self.now + seconds
        while self.now < end:
            self.tick(heard, acknowledged)
            self.now += self.life.period

    def tick(self, heard: int, acknowledged: float | None = None) -> None:
        for verdict in self.life.tick(self.now, {PEER: SignsOfLife(heard, acknowledged)}):
            assert isinstance(verdict, Verdict) and verdict.peer == PEER
            self.told.append((self.now - 1000.0, verdict.kind))


def test_silence_makes_suspect_then_lost() -> None:
    watch = Watch()
    watch.run(10, 1)
    (first, suspect), (second, lost) = watch.told[:2]
    assert (suspect, lost) == ("suspect", "lost")
    assert 3 <= first <= 3.5 + watch.life.period and 5 <= second <= 5.5 + watch.life.period


def test_any_bytes_are_life() -> None:
    watch = Watch()
    for heard in range(20):
        watch.run(2.5, heard)
    assert watch.told == []


def test_a_suspect_that_is_heard_again_has_recovered() -> None:
    watch = Watch()
    watch.run(4, 1)
    watch.run(2, 2)
    watch.run(4, 3)
    assert [kind for _, kind in watch.told] == ["suspect", "recovered", "suspect"]


def test_a_process_whose_host_answers_is_suspect_and_not_lost() -> None:
    watch = Watch()
    watch.run(50, 1, acknowledged=0.2)
    assert [kind for _, kind in watch.told] == ["suspect"]
    watch.run(20, 1, acknowledged=0.2)
    assert [kind for _, kind in watch.told][:2] == ["suspect", "lost"] and watch.told[1][0] >= 60


def test_a_host_that_no_longer_answers_is_lost_at_once_if_the_process_was_silent_long_enough() -> None:
    watch = Watch()
    watch.run(20, 1, acknowledged=0.2)
    begin = watch.now - 1000
    watch.run(1, 1, acknowledged=5.0)
    assert watch.told[1][1] == "lost" and watch.told[1][0] <= begin + 2 * watch.life.period


def test_who_was_stopped_himself_blames_nobody() -> None:
    watch = Watch()
    watch.run(2, 1)
    watch.now += 30  # SIGSTOP, SIGCONT; what came meanwhile is read only later
    watch.run(2.5, 1)
    watch.run(2, 2)
    assert watch.told == []


def test_a_tick_that_is_a_little_late_is_no_excuse() -> None:
    watch = Watch()
    for _ in range(6):
        watch.tick(1)
        watch.now += watch.life.period + 0.9
    assert [kind for _, kind in watch.told][:2] == ["suspect", "lost"]


def test_a_new_connection_to_a_peer_begins_anew() -> None:
    watch = Watch()
    watch.run(4, 5)
    watch.life.tick(watch.now, {})
    watch.run(2.5, 5)
    assert [kind for _, kind in watch.told] == ["suspect"]
