"""A damaged record is a ValueError that says where; one that is read plays, in each panel and at each frame."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import (
    compare,
    flow,
    gpipe,
    launch,
    meet,
    own,
    record,
    run_backward,
    sample,
    send,
    tell,
    use,
    value,
    world,
)
from spoiled import DAMAGE, damaged

from rpcbench.panels import PANELS
from rpcbench.telemetry.recording import FORMAT, VERSION, Player, Record, flatten_world, load_record
from rpcbench.telemetry.views import diff_views


def whole() -> dict[str, Any]:
    """Two frames with rows of each table."""
    at = world(2)
    before = flatten_world(copy.deepcopy(at), None)
    own(at, 1, "0.1", size=8)
    use(at, 0, "0.2", "0.1", 1)
    record(at, 3, [(1, 0, 1)], {0: 0, 1: 1})
    run_backward(at, 3, "0.1", 1, 2, 1)
    gpipe(at, 1, 2, 2, 1.0)
    send(at, 0, 1, "Call", 5.0, label="f")
    meet(at, 1, {1: 1.0, 2: 1.5}, 2.0)
    tell(at, 1, lent={"0": 5}, cores=2, clock=3.5)
    sample(at, 100, {0: 0.5, 1: 1.0}, began=(1,))
    flow(at, 1, {0: (1, 2, 3, 0)})
    launch(at, 1)
    compare(at, value("initial", "up.weight"), value("forward", "up", "wrong", maps=[[[0], [1, 1], [[9]]]]), first="1")
    after = flatten_world(at, None)
    frames = [[0.0, diff_views({}, before), "begin"], [0.5, diff_views(before, after), ""]]
    return {"format": FORMAT, "version": VERSION, "holds": {"members": 3}, "leaves_out": ["x"], "frames": frames}


TEXT = json.dumps(whole())


def play(played: Record) -> None:
    """Look at each frame, in each panel."""
    player = Player(played)
    for at in range(len(played.frames)):
        player.go_to_frame(at)
        for panel in PANELS.values():
            panel.look(player.world())
    assert str(played)


def test_the_whole_one_plays(tmp_path: Path) -> None:
    (tmp_path / "lesson.json").write_text(TEXT)
    play(load_record(tmp_path / "lesson.json"))


def test_one_with_an_operation_that_runs_plays(tmp_path: Path) -> None:
    changed = json.loads(TEXT)
    row = changed["frames"][1][1]["2 ops"]["set"]["s1.w2.3"]
    row |= {"end": None, "held": None}  # as `StepRecord` has it
    path = tmp_path / "lesson.json"
    path.write_text(json.dumps(changed))
    play(load_record(path))
    row["end"] = row["begin"] + 1.0  # of a stage of torch, which does not say what it holds
    path.write_text(json.dumps(changed))
    play(load_record(path))
    del row["held"]
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="held"):
        load_record(path)


def is_refused_or_plays(path: Path) -> None:
    try:
        found = load_record(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        play(found)


@DAMAGE
@given(data=st.data())
def test_damaged_bytes(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "lesson.json"
    path.write_bytes(damaged(TEXT.encode(), data.draw))
    is_refused_or_plays(path)


def parts(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to each part."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, part in inner for found in parts(part, (*place, key)))][not place :]


PARTS = parts(json.loads(TEXT))
STRANGE = st.sampled_from(
    [None, True, "x", "", "0", -1, 1.5, 10**30, [], [None], {}, {"x": None}, {"set": {}, "drop": []}]
)


@DAMAGE
@given(place=st.sampled_from(PARTS), other=st.none() | STRANGE, remove=st.booleans())
def test_another_part_or_none(tmp_path: Path, place: tuple[Any, ...], other: Any, remove: bool) -> None:
    changed = json.loads(TEXT)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    if remove:
        del holder[place[-1]]
    else:
        holder[place[-1]] = other
    path = tmp_path / "lesson.json"
    path.write_text(json.dumps(changed))
    is_refused_or_plays(path)


@pytest.mark.parametrize(
    ("place", "other", "told"),
    [
        (["frames"], 3, r"the record: Expected `array`, got `int` - at `\$.frames`"),
        (["frames", 0], [1.0], "frame 0: Expected `array` of length 3, got 1"),
        (["frames", 0, 0], float("nan"), "frame 0: Expected `float` > "),
        (["frames", 1, 1, "1 owned", "drop"], None, r"frame 1, section '1 owned': Expected `array`, .* `\$.drop`"),
        (
            ["frames", 1, 1, "1 owned", "set", "0.1", "forks"],
            [{}],
            r"frame 1, section '1 owned', row '0\.1': .* required field `fork` - at `\$.forks\[0\]`",
        ),
        (["frames", 1, 1, "0 messages", "set", "0>1.0", "sent"], None, r"frame 1, .* row '0>1\.0': 'sent'"),
        (["frames", 0, 1, "members", "set", "1", "clock"], [1], r"frame 0, section 'members', row '1': its 'id'"),
    ],
)
def test_it_says_where(tmp_path: Path, place: list[Any], other: Any, told: str) -> None:
    changed = json.loads(TEXT)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = other
    (tmp_path / "lesson.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=f"lesson.json is damaged: {told}"):
        load_record(tmp_path / "lesson.json")
    (tmp_path / "lesson.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"lesson\.json is not a record of rpcbench"):
        load_record(tmp_path / "lesson.json")
