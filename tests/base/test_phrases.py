from __future__ import annotations

import pytest

from rpcbench.base.errors import count_noun, suggest_nearest


@pytest.mark.parametrize(
    ("number", "noun", "phrase"),
    [(0, "cell", "0 cells"), (1, "cell", "1 cell"), (2, "micro-batch", "2 micro-batches"), (1, "batch", "1 batch")],
)
def test_a_count_is_followed_by_its_noun_in_the_right_number(number: int, noun: str, phrase: str) -> None:
    assert count_noun(number, noun) == phrase


@pytest.mark.parametrize(
    ("word", "there", "phrase"),
    [
        ("--knid", ["--kind", "--name"], "did you mean --kind? There are --kind, --name"),
        ("x", ["start", "stop"], "there are start, stop"),
        ("x", [], "there are none"),
    ],
)
def test_the_nearest_word_is_suggested(word: str, there: list[str], phrase: str) -> None:
    assert suggest_nearest(word, there) == phrase
