"""Phrases of messages that depend on a value: a number with its noun, and the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`, `2 batches`."""
    ending = "es" if noun.endswith(("s", "x", "sh", "tch", "nch")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


def nearest(word: str, there: Iterable[str]) -> str:
    """`did you mean workers? There are rrefs, workers`: what to say of a word that is none of those."""
    names = list(there)
    near = difflib.get_close_matches(word, names, 1, 0.5)
    told = f"here are {', '.join(names)}" if names else "here are none"
    return f"did you mean {near[0]}? T{told}" if near else f"t{told}"
