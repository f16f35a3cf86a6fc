"""A bar that moves with the steps of a `fit`: loss, share of the time that workers stood idle, samples a second.

It is tqdm's: a widget in a notebook, a line on stderr in a script. A hidden one costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from operator import length_hint
from types import TracebackType
from typing import Any

from rpcbench.pipeline.runs import StepResult

EVERY = 0.1
"""Seconds between two looks: idle shares are computed for these only."""


class Progress:
    """One bar for all epochs over a loader; `with` shows and closes it."""

    def __init__(self, loader: Iterable[Any], epochs: int, shown: bool) -> None:
        self._loader, self._epochs, self._shown = loader, epochs, shown
        self._bar: Any = None
        self._samples = 0
        self._began = self._looked = 0.0

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self._shown:
            from tqdm.auto import tqdm  # here: it asks whether this is a notebook when it is first loaded

            steps = length_hint(self._loader) * self._epochs  # 0: not known
            self._bar = tqdm(total=steps or None, unit="step")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def epoch(self, number: int) -> None:
        """An epoch begins, counted from 0."""
        if self._bar is not None:
            self._bar.set_description(f"epoch {number + 1}/{self._epochs}")

    def step(self, result: StepResult) -> None:
        """A step is done."""
        self._samples += result.samples
        if self._bar is None:
            return
        now = time.monotonic()
        last = self._bar.total is not None and self._bar.n + 1 == self._bar.total
        if last or now - self._looked >= EVERY:
            self._looked = now
            rate = self._samples / max(now - self._began, 1e-9)
            shown = {"loss": f"{result.loss:.4g}", "idle": f"{result.idle:.0%}", "samples/s": f"{rate:.0f}"}
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update()
