from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rpcbench.protocol.delivery import ReceiveWindow


@given(st.lists(st.integers(0, 20), max_size=60))
def test_a_window_reports_each_number_as_new_once(numbers: list[int]) -> None:
    window, seen = ReceiveWindow(), set()
    for number in numbers:
        assert window.is_first_time(number) == (number not in seen)
        seen.add(number)


@given(st.permutations(range(30)))
def test_a_window_keeps_only_the_numbers_beyond_the_first_gap(numbers: list[int]) -> None:
    window, seen = ReceiveWindow(), set()
    for number in numbers:
        window.is_first_time(number)
        seen.add(number)
        gap = min(set(range(31)) - seen)
        assert len(window) == sum(number > gap for number in seen)
    assert len(window) == 0
