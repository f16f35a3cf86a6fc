"""Which worker of a cluster has which GPU: `Cluster(4, gpus=[0, 1, 2, 3])`, `%cluster start 4 --gpus 0,1,2,3`.

Guarantees
- worker1 has the first GPU of the list, worker2 the second, and so on; a worker that is started again has the same one.
- Numbers count the GPUs that CUDA shows to this process: with CUDA_VISIBLE_DEVICES=4,5 there are 0 and 1.
- Two workers share a GPU only where its number is said twice.
- Without a list each worker has a GPU of its own if there are enough for all; otherwise none is pinned, and each sees
  the GPUs that this process sees. Workers that are added later and find no GPU left are not pinned either.
- A mistake is a ValueError in one sentence, before any process starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rpcbench.base.config import VISIBLE_GPUS
from rpcbench.base.errors import count_noun
from rpcbench.runtime import gpus

NONE = "none"
"""The word for workers without a GPU of their own."""
Chosen = str | Sequence[int] | None
"""Numbers, as a sequence or in a text with commas; "none"; None: one GPU for each worker, if there are enough."""


class GpuPins:
    """The GPUs of the workers of one cluster.

    Args:
        chosen: As above.
        n: The number of workers.
        launcher: The name of their launcher.
        elsewhere: How workers get their GPUs if that launcher assigns none; empty if it does.

    Raises:
        ValueError: The launcher cannot; a word is no number; there is no such GPU; there are more workers than GPUs.
    """

    def __init__(self, chosen: Chosen, n: int, launcher: str, elsewhere: str = "") -> None:
        self._entries: tuple[str, ...] = ()  # of CUDA_VISIBLE_DEVICES, one for each worker
        self._chosen: tuple[int, ...] | None = None  # numbers, if they were given
        if chosen is None:
            there = [] if elsewhere else gpus.visible_gpus()
            self._entries = tuple(gpu.entry for gpu in there) if len(there) >= n else ()
        elif chosen != NONE:
            if elsewhere:
                raise ValueError(f"{_format_choice(chosen)}: the launcher {launcher!r} assigns no GPUs; {elsewhere}")
            words = chosen.split(",") if isinstance(chosen, str) else chosen
            if not isinstance(words, list | tuple | range):
                raise ValueError(f"gpus={chosen!r} is no list of GPUs: gpus=[0, 1], in a notebook --gpus 0,1")
            self._chosen = tuple(_parse_number(word) for word in words)
            self._entries = _entries_of_gpus(self._chosen)
        self.check_worker_count(n)

    def check_worker_count(self, n: int) -> None:
        """Raise ValueError if a list was given that is too short for `n` workers."""
        if self._chosen is not None and n > len(self._chosen):
            raise ValueError(
                f"{_format_choice(self._chosen)} has {count_noun(len(self._chosen), 'GPU')} for "
                f"{count_noun(n, 'worker')}: name one "
                f"for each (a number said twice is shared), or pin none: gpus={NONE!r}, in a notebook --gpus {NONE}"
            )

    def entry_of_worker(self, number: int) -> str:
        """Return the entry of CUDA_VISIBLE_DEVICES for worker `number`, counted from 1; empty: it is not pinned."""
        return self._entries[number - 1] if number <= len(self._entries) else ""


def gpu_choices(n: int) -> list[str]:
    """Return the values of `--gpus` that suit `n` workers, for completion."""
    numbers = list(map(str, range(len(gpus.visible_gpus()))))
    return [",".join(numbers[:n]), NONE] if len(numbers) >= n else [NONE]


def _format_choice(chosen: str | Sequence[int]) -> str:
    return f"gpus={chosen if isinstance(chosen, str) else list(chosen)}"


def _parse_number(word: object) -> int:
    text = str(word).strip()
    if isinstance(word, bool) or not (text.isascii() and text.isdecimal()):
        raise ValueError(
            f"{text!r} is not the number of a GPU: say numbers with commas, gpus=[0, 1], in a notebook --gpus 0,1; "
            f"or {NONE}"
        )
    return int(text)


def _entries_of_gpus(numbers: Sequence[int]) -> tuple[str, ...]:
    there = gpus.visible_gpus()
    if missing := [number for number in numbers if number >= len(there)]:
        raise ValueError(f"there is no GPU {missing[0]}: {_describe_numbers(len(there))}")
    return tuple(there[number].entry for number in numbers)


def _describe_numbers(count: int) -> str:
    shown = os.environ.get(VISIBLE_GPUS)
    where = f"{VISIBLE_GPUS}={shown}" if shown is not None else "this host"
    if not count:
        return f"{where} has none that this process can use"
    return f"{where} has {', '.join(map(str, range(count)))}"
