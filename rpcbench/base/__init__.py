"""Floor 0: what every other floor uses: errors, ids, events, futures, configuration, charts. No I/O."""

from __future__ import annotations
