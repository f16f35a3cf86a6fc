"""Inquiries find each circle of waiting calls, and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rpcbench.protocol.calls import CallKey, Fact, Inquiry, Need

Graph = dict[CallKey, tuple[Need, ...]]


def graph(edges: dict[int, list[int]], members: int = 3) -> Graph:
    """Calls by number; number n is to be answered by member n modulo `members`."""
    return {
        CallKey(n % 2, n): tuple(Need(CallKey(to % 2, to), to % members) for to in needs) for n, needs in edges.items()
    }


def inquire(calls: Graph, start: list[int], members: int = 3) -> tuple[Inquiry, list[dict[int, list[CallKey]]]]:
    inquiry = Inquiry([Need(CallKey(n % 2, n), n % members) for n in start])
    rounds = []
    while asked := inquiry.next_questions():
        rounds.append(asked)
        for at, about in asked.items():
            inquiry.add_facts(Fact(call, at, "f", "waits", 0.0, calls[call], ()) for call in about if call in calls)
    return inquiry, rounds


def circle(edges: dict[int, list[int]], *start: int) -> list[int]:
    return [fact.call.number for fact in inquire(graph(edges), list(start))[0].find_cycle()]


def test_a_chain_of_waits_that_ends_is_no_circle() -> None:
    assert circle({1: [2], 2: [3], 3: []}, 1) == []
    assert circle({1: [2], 2: [3]}, 1) == [], "the last call has ended meanwhile"
    assert circle({1: [2, 3], 2: [4], 3: [4], 4: []}, 1) == [], "two paths to one call"


def test_a_circle_begins_with_the_same_call_from_each_start() -> None:
    edges = {1: [2], 2: [3], 3: [1]}
    assert [circle(edges, start) for start in (1, 2, 3)] == [[2, 3, 1]] * 3, (
        "the call with the smallest id, which caller 0 made, is first"
    )
    assert circle({7: [7]}, 7) == [7]


def test_a_call_that_waits_for_a_circle_is_not_part_of_it() -> None:
    assert circle({1: [2], 2: [4], 4: [2]}, 1) == [2, 4]
    assert circle({0: [4], 2: [4], 4: [2]}, 0) == [2, 4]
    assert circle({1: [2, 4], 2: [], 4: [6], 6: [4]}, 1) == [4, 6]


def test_an_inquiry_asks_about_each_call_once_and_only_its_member() -> None:
    edges = {1: [2, 3, 6], 2: [5], 3: [5], 5: [1], 6: []}
    inquiry, rounds = inquire(graph(edges), [1])
    assert rounds == [
        {1: [CallKey(1, 1)]},
        {2: [CallKey(0, 2)], 0: [CallKey(1, 3), CallKey(0, 6)]},
        {2: [CallKey(1, 5)]},
    ]
    assert sorted(fact.call.number for fact in inquiry.facts.values()) == [1, 2, 3, 5, 6]


def reaches(edges: dict[int, list[int]], start: int) -> set[int]:
    seen: set[int] = set()
    ahead = list(edges.get(start, []))
    while ahead:
        number = ahead.pop()
        if number not in seen:
            seen.add(number)
            ahead += edges.get(number, [])
    return seen


@given(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 12), max_size=3), max_size=10), st.integers(0, 9))
def test_an_inquiry_finds_a_circle_exactly_if_there_is_one(edges: dict[int, list[int]], start: int) -> None:
    found = circle(edges, start)
    there = {start} | reaches(edges, start)
    circular = {number for number in there if number in reaches(edges, number)}
    assert bool(found) == bool(circular)
    assert all(after in edges[number] for number, after in zip(found, found[1:] + found[:1], strict=True))
