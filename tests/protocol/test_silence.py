"""The failure detector, fed with times and byte counts: no clock, no socket."""

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
        """Let time pass while the count of received bytes stays at `heard`."""
        end = self.now + seconds
        while self.now < end:
            self.tick(heard, acknowledged)
            self.now += self.life.period

    def tick(self, heard: int, acknowledged: float | None = None) -> None:
        for verdict in self.life.judge_peers(self.now, {PEER: SignsOfLife(heard, acknowledged)}):
            assert isinstance(verdict, Verdict) and verdict.peer == PEER
            self.told.append((self.now - 1000.0, verdict.kind))


def test_a_silent_peer_is_reported_as_suspect_and_then_as_lost() -> None:
    watch = Watch()
    watch.run(10, 1)
    (first, suspect), (second, lost) = watch.told[:2]
    assert (suspect, lost) == ("suspect", "lost")
    assert 3 <= first <= 3.5 + watch.life.period and 5 <= second <= 5.5 + watch.life.period


def test_a_peer_that_sends_any_bytes_is_not_reported() -> None:
    watch = Watch()
    for heard in range(20):
        watch.run(2.5, heard)
    assert watch.told == []


def test_a_suspect_peer_that_sends_again_is_reported_as_recovered() -> None:
    watch = Watch()
    watch.run(4, 1)
    watch.run(2, 2)
    watch.run(4, 3)
    assert [kind for _, kind in watch.told] == ["suspect", "recovered", "suspect"]


def test_a_silent_peer_whose_host_acknowledges_is_suspect_and_lost_only_after_60_seconds() -> None:
    watch = Watch()
    watch.run(50, 1, acknowledged=0.2)
    assert [kind for _, kind in watch.told] == ["suspect"]
    watch.run(20, 1, acknowledged=0.2)
    assert [kind for _, kind in watch.told][:2] == ["suspect", "lost"] and watch.told[1][0] >= 60


def test_a_silent_peer_is_lost_as_soon_as_its_host_stops_to_acknowledge() -> None:
    watch = Watch()
    watch.run(20, 1, acknowledged=0.2)
    begin = watch.now - 1000
    watch.run(1, 1, acknowledged=5.0)
    assert watch.told[1][1] == "lost" and watch.told[1][0] <= begin + 2 * watch.life.period


def test_a_process_that_was_stopped_itself_reports_no_peer() -> None:
    watch = Watch()
    watch.run(2, 1)
    watch.now += 30  # SIGSTOP, SIGCONT; bytes that arrived meanwhile are read later
    watch.run(2.5, 1)
    watch.run(2, 2)
    assert watch.told == []


def test_a_peer_is_reported_as_lost_even_if_each_tick_is_slightly_late() -> None:
    watch = Watch()
    for _ in range(6):
        watch.tick(1)
        watch.now += watch.life.period + 0.9
    assert [kind for _, kind in watch.told][:2] == ["suspect", "lost"]


def test_a_new_connection_to_a_peer_resets_its_time_of_silence() -> None:
    watch = Watch()
    watch.run(4, 5)
    watch.life.judge_peers(watch.now, {})
    watch.run(2.5, 5)
    assert [kind for _, kind in watch.told] == ["suspect"]
