"""A record says of each moment what the tables said, without any worker, and nothing that was not asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from spoiled import disk_of
from worlds import until, world

from rpcbench.rpc import remote, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry import recording
from rpcbench.telemetry.autograd_view import autograd_view
from rpcbench.telemetry.message_views import messages_view
from rpcbench.telemetry.recording import (
    Cleaner,
    Player,
    Record,
    flatten_world,
    load_record,
    record,
    world_from_sections,
)
from rpcbench.telemetry.views import rref_view


@pytest.fixture
def agents(tmp_path: Path, no_leaks: None) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


def same(one: Any, other: Any) -> bool:
    """Whether two worlds say the same, as far as a record does."""
    return json.loads(json.dumps(flatten_world(one))) == json.loads(json.dumps(flatten_world(other)))


def named(played: Record, name: str) -> Any:
    """The world at the moment of that name."""
    player = Player(played)
    player.go_to_frame(next(i for i, frame in enumerate(played.frames) if frame[2] == name))
    return player.world()


def test_at_each_marked_moment_it_equals_the_live_tables(agents: list[Agent], tmp_path: Path) -> None:
    collector = collect.current_collector()
    live = {}
    rrefs = []
    with record(tmp_path / "lesson.json") as running:
        for moment in range(5):
            rrefs.append(remote(f"worker{1 + moment % 2}", torch.ones, (moment + 1,)))
            until(rrefs[-1].confirmed_by_owner)
            rpc_sync("worker1", str, (rrefs[0],))
            del rrefs[1:3]
            assert collector.settle(20)
            while True:  # what follows from a call may come between the look here and that of the record
                before = collector.world()
                running.mark(f"moment {moment}")
                if same(before, collector.world()):
                    break
            live[f"moment {moment}"] = before
    played = load_record(tmp_path / "lesson.json")
    for name, at in live.items():
        last = max(i for i, frame in enumerate(played.frames) if frame[2] == name)
        player = Player(played)
        player.go_to_frame(last)
        assert same(player.world(), at)
        for view in (rref_view, autograd_view, messages_view):
            assert view(player.world()) == view(at)
    del rrefs


def test_the_record_ends_with_what_members_had_yet_to_tell(agents: list[Agent], tmp_path: Path) -> None:
    running = record(tmp_path / "lesson.json")
    rpc_sync("worker1", torch.add, (1, 2), {})
    made = running.stop()
    rows = messages_view(named(load_record(tmp_path / "lesson.json"), "end"))["messages"].values()
    assert [(row["kind"], row["state"]) for row in rows] == [("Call", "received"), ("Result", "received")]
    assert running.stop() == made
    until(lambda: not any(agent.links.bus.listening for agent in agents))


def test_it_can_be_played_forth_and_back_and_tells_who_looks(agents: list[Agent], tmp_path: Path) -> None:
    with record(tmp_path / "lesson.json") as running:
        first = remote("worker1", int)
        until(first.confirmed_by_owner)
        until(lambda: len(running.record().frames) > 1)
        running.mark("one")
        del first
    player = Player(load_record(tmp_path / "lesson.json"))
    worlds = []
    for frame in range(len(player.record.frames)):
        player.go_to_frame(frame)
        worlds.append(player.world())
    woken = []
    stop = player.subscribe(lambda: woken.append(player.at))
    for frame in reversed(range(len(worlds))):
        player.go_to_frame(frame)
        assert player.world() == worlds[frame]
    assert woken == list(reversed(range(len(worlds))))
    player.go_to_frame(10_000)
    assert player.at == len(worlds) - 1
    stop()
    player.go_to_frame(0)
    assert woken[-1] == len(worlds) - 1


def test_it_says_what_it_holds_and_what_it_leaves_out(agents: list[Agent], tmp_path: Path) -> None:
    agents[1].links.bus.register_table("logs", lambda: {"1": {"text": "a line"}})
    for everything in (False, True):
        with record(tmp_path / "lesson.json", everything):
            rpc_sync("worker1", int)
        file = (tmp_path / "lesson.json").read_text()
        about = json.loads(file)
        assert (about["format"], about["version"]) == ("rpcbench record", 1)
        assert about["holds"]["members"] == 3 and about["holds"]["frames"] == len(about["frames"])
        assert about["holds"]["rows of messages"] > 0
        assert ("table logs" in about["leaves_out"]) is not everything
        assert ("a line" in file) is everything and "values of tensors" in about["leaves_out"]
        words = str(load_record(tmp_path / "lesson.json"))
        assert words.startswith(f"record of {about['frames'][-1][0]:.1f} s, 3 members: ")
        assert ", and what was known as it began; without" in words, "messages of before are in its first frame"
        assert "messages" in words and "rows of" not in words and "table" not in words
        assert ("processes and logs" in words) is not everything


def test_values_of_tensors_are_not_in_it(agents: list[Agent], tmp_path: Path) -> None:
    with record(tmp_path / "lesson.json", everything=True):
        rref = remote("worker1", torch.full, ((3,), 123456.75))
        assert rref.to_here()[0] == 123456.75
    assert "123456.75" not in (tmp_path / "lesson.json").read_text()
    del rref


def test_paths_and_secrets_are_taken_out_of_strings() -> None:
    nested = Cleaner({"A_TOKEN": "abcdef", "B_TOKEN": "abcdefghij"})
    assert nested.clean_value("x abcdefghij abcdef") == "x *** ***"
    cleaner = Cleaner({"API_TOKEN": "s3cr3t-value", "PATH": "/usr/bin", "A_KEY": "x"}, Path("/mnt/eve"))
    row = {"label": "f of /mnt/eve/code/a.py", "more": ["/home/ann/b.py and /Users/bo/c", "has s3cr3t-value"], "n": 1}
    assert cleaner.clean_value(row) == {"label": "f of ~/code/a.py", "more": ["~/b.py and ~/c", "has ***"], "n": 1}
    assert cleaner.clean_value("/usr/bin x") == "/usr/bin x", "neither a secret's name nor long enough"


def test_a_label_that_holds_a_home_path_is_cleaned_on_its_way(agents: list[Agent], tmp_path: Path) -> None:
    with record(tmp_path / "lesson.json"):
        agents[0].call(1, int, label=f"{Path.home()}/secret/place.py").wait()
    file = (tmp_path / "lesson.json").read_text()
    assert "~/secret/place.py" in file and f"{Path.home()}/secret" not in file


def test_when_it_is_full_it_says_so(agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_ROWS", 10)
    with record(tmp_path / "lesson.json") as running:
        while not any("first 10 rows" in words for words in running.record().about["leaves_out"]):
            rpc_sync("worker1", int)
    held = load_record(tmp_path / "lesson.json").about["holds"]["rows of messages"]
    assert held > 0 and load_record(tmp_path / "lesson.json").frames[-1][2] != "end"


def test_on_a_full_disk_the_record_of_before_stays_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "lesson.json"
    before = Record({"format": "rpcbench record"}, ()).save(target).read_bytes()
    with disk_of(10), pytest.raises(OSError, match=r"File too large: .*/lesson\.json'$"):
        Record({"format": "another"}, ()).save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["lesson.json"] and target.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not a record of rpcbench"),
        ("[]", "not a record of rpcbench"),
        ('{"format": "other"}', "not a record of rpcbench"),
        ('{"format": "rpcbench record", "version": 2}', "a record of version 2; this rpcbench reads version 1"),
    ],
)
def test_other_files_are_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_record(tmp_path / "x.json")


def test_a_world_is_the_same_after_it_was_flat() -> None:
    at = {3: {"name": "w", "id": 3, "state": "up", "clock": [1.0, 0.5], "tables": {"owned": {"0.1": {"a": 1}}}}}
    assert world_from_sections(flatten_world(at)) == at
