"""Whether a step is applied: agreed among the workers of a pipeline, so that none waits for a word of their driver.

    first worker    R R R      all have their gradients ── O O O ──► its optimizers step
    another one     ── R ──►                               ── O ──►  its optimizers step

Guarantees
- No optimizer steps before all workers have all gradients: two phases, and the first worker is who decides.
- A step that was ended before the first worker had decided is applied nowhere. So who wants to end one asks that, and
  as long as it lives its answer is that of all. If it has gone, each of the others can be ended until it has heard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rpcbench.pipeline.mail import Mail
from rpcbench.pipeline.slots import ALL, MINE, Slot

_WORD = torch.zeros(1, dtype=torch.uint8)
"""Nothing needs to be said; as a tensor it goes by the lanes that there are."""


class Accord:
    """One worker's part. `workers`: ids of all, `own` among them."""

    def __init__(self, own: int, workers: Sequence[int], mail: Mail) -> None:
        self._own, self._first, self._others = own, workers[0], workers[1:]
        self._mail = mail

    def reach(self, step: int) -> None:
        """Wait until all have come so far. From then on the step is to be applied here. As `Slots.take`."""
        if self._own == self._first:
            for other in self._others:
                self._mail.take(Slot(step, MINE, 0, self._own, other))
            self._mail.slots.agree(step)
            self._tell_all(step)
        else:
            self._mail.send(Slot(step, MINE, 0, self._first, self._own), (_WORD,))
            self._mail.take(Slot(step, ALL, 0, self._own, self._first))
            self._mail.slots.agree(step)

    def _tell_all(self, step: int) -> None:
        """All others hear that it goes on; who cannot be told that waits no longer, and the error is raised."""
        failed: Exception | None = None
        for other in self._others:
            try:
                self._mail.send(Slot(step, ALL, 0, other, self._own), (_WORD,))
            except Exception as error:  # noqa: BLE001  (raised below)
                failed = failed or error
                self._mail.end(other, step, f"{type(error).__name__}: {error}")
        if failed is not None:
            raise failed
