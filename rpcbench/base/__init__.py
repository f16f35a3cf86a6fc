"""Layer 0, which all other layers use: errors, ids, events, futures, configuration, charts. No I/O."""

from __future__ import annotations
