"""Target words are resolved to names of workers."""

from __future__ import annotations

import pytest

from rpcbench.cells.targets import TargetError, Targets

WORKERS = ["worker1", "worker2", "worker3"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("worker2", "2"),
        ("all", "123"),
        ("worker3,worker1", "31"),
        ("worker3 all", "312"),
        ("[1:]", "23"),
        ("[:2]", "12"),
        ("[::2]", "13"),
        ("[-1]", "3"),
        ("[0]", "1"),
        ("[-2:]", "23"),
        ("[::-1]", "321"),
        ("[:]", "123"),
        ("rest", "23"),
        ("pair", "32"),
        ("both,worker1", "321"),
    ],
)
def test_target_words_are_resolved_to_distinct_workers(words, meant):
    targets = Targets()
    targets.save_group("rest", ["[1:]"], WORKERS)
    targets.save_group("pair", ["worker3", "worker2"], WORKERS)
    targets.save_group("both", ["pair", "rest"], WORKERS)
    assert targets.select_workers(words.split(), WORKERS) == [f"worker{number}" for number in meant]


def test_an_unknown_word_is_returned_unchanged():
    assert Targets().select_workers(["nobody"], WORKERS) == ["nobody"]


@pytest.mark.parametrize("word", ["[]", "[a]", "[1", "[1:2:3:4]", "[1,2]", "[::0]", "[1.0]"])
def test_an_invalid_slice_is_refused(word):
    with pytest.raises(TargetError, match="slice"):
        Targets().select_workers([word], WORKERS)


@pytest.mark.parametrize("words", ["[5]", "[3:]", "[-4]"])
def test_a_target_without_workers_is_refused_and_the_workers_are_named(words):
    with pytest.raises(RuntimeError, match="there are worker1, worker2, worker3"):
        Targets().select_workers([words], WORKERS)
    with pytest.raises(RuntimeError, match="no worker is left"):
        Targets().select_workers(["all"], [])


def test_a_group_loses_the_workers_that_have_left():
    targets = Targets()
    targets.save_group("pair", ["worker1", "worker3"], WORKERS)
    assert targets.select_workers(["pair"], ["worker1", "worker2"]) == ["worker1"]
    with pytest.raises(RuntimeError, match="pair means no worker"):
        targets.select_workers(["pair"], ["worker2"])


@pytest.mark.parametrize("name", ["all", "worker1", "a b", "[1]", ""])
def test_a_reserved_or_invalid_name_of_a_group_is_refused(name):
    with pytest.raises(TargetError, match="cannot name a group"):
        Targets().save_group(name, ["worker2"], WORKERS)


def test_a_group_that_contains_itself_is_refused():
    targets = Targets()
    targets.save_group("one", ["worker1"], WORKERS)
    targets.save_group("two", ["one"], WORKERS)
    with pytest.raises(TargetError, match="itself"):
        targets.save_group("one", ["two"], WORKERS)
    assert targets.select_workers(["two"], WORKERS) == ["worker1"]
