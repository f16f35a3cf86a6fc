"""Selects workers by words: names, `all`, slices such as `[1:]`, and saved groups.

A group is stored as it was written and resolved at each use, so it follows workers that join and leave. A name in it
that is no worker now is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ALL = "all"
_SLICE = re.compile(r"\[(-?\d+)?(?:(:)(-?\d+)?(?::(-?\d+)?)?)?\]")  # [index] or [start:stop:step]


class TargetError(ValueError):
    """An error for words that cannot select workers."""


class Targets:
    """The groups of one notebook."""

    def __init__(self) -> None:
        self.groups: dict[str, tuple[str, ...]] = {}  # words by name of the group

    def save_group(self, name: str, words: Sequence[str], workers: Sequence[str]) -> list[str]:
        """Save a group and return its present workers. Raises TargetError for a name that is taken."""
        if not name.isidentifier() or name == ALL or name in workers:
            raise TargetError(f"{name!r} cannot name a group: take another word, such as trainers")
        if self._is_mentioned(_split_words(words), name):  # `select_workers` would not end
            raise TargetError(f"{name} cannot be a part of itself")
        found = self.select_workers(words, workers)
        self.groups[name] = tuple(_split_words(words))
        return found

    def _is_mentioned(self, words: Sequence[str], name: str) -> bool:
        return name in words or any(self._is_mentioned(self.groups.get(word, ()), name) for word in words)

    def select_workers(self, words: Sequence[str], workers: Sequence[str]) -> list[str]:
        """Return the selected workers, each once. Raises RuntimeError if there are none."""
        names = list(dict.fromkeys(name for word in _split_words(words) for name in self._resolve_word(word, workers)))
        if not names:
            there = f"there are {', '.join(workers)}" if workers else "no worker is left; cluster.scale(2) starts two"
            raise RuntimeError(f"{' '.join(words)} means no worker: {there}")
        return names

    def _resolve_word(self, word: str, workers: Sequence[str]) -> Sequence[str]:
        if word == ALL:
            return workers
        if word.startswith("["):
            return _apply_slice(word, workers)
        if word in self.groups and word not in workers:  # a worker that joined later may have the group's name
            return [name for part in self.groups[word] for name in self._resolve_word(part, workers) if name in workers]
        return [word]


def _split_words(words: Sequence[str]) -> list[str]:
    return [part for word in words for part in word.split(",") if part]


def _apply_slice(word: str, workers: Sequence[str]) -> Sequence[str]:
    found = _SLICE.fullmatch(word)
    if found is None or word == "[]":
        raise TargetError(f"{word} is no slice of the workers; write [0], [1:], [:2] or [::2]")
    start, colon, *rest = (found[1], found[2], found[3], found[4])
    first, stop, step = (None if text is None else int(text) for text in (start, *rest))
    if colon is not None:
        if step == 0:
            raise TargetError(f"{word}: the step of a slice cannot be 0")
        return workers[first:stop:step]
    assert first is not None, "the pattern has a number or a colon"
    return workers[first : first + 1 or None] if -len(workers) <= first < len(workers) else []
