"""What was measured: batches of values, and what is read from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import numpy as np


@dataclass(frozen=True, slots=True)
class Batch:
    """The seconds of each call, or other values in the unit of the row; and CPU seconds of one call."""

    values: list[float]
    cpu: float | None = None


@dataclass(slots=True)
class Samples:
    """One row on one side, batch by batch in the order of measuring. `main` is the quantile of values that counts."""

    main: float = 0.5
    batches: list[Batch] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(batch.values) for batch in self.batches)

    @property
    def value(self) -> float:
        return self._quantile(self.main)

    @property
    def p10(self) -> float:
        return self._quantile(0.1)

    @property
    def cpu(self) -> float | None:
        """Median over the batches; None where it was not measured."""
        known = [batch.cpu for batch in self.batches if batch.cpu is not None]
        return median(known) if known else None

    def _quantile(self, which: float) -> float:
        return float(np.quantile(list(self._all()), which))

    def _all(self) -> Iterable[float]:
        return (value for batch in self.batches for value in batch.values)


Figures = dict[str, dict[str, Samples]]
"""{title of the row: {name of the side: samples}}; a side that cannot do it is missing."""
