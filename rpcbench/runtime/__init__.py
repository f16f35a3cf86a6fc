"""Floor 4: one agent per member: it feeds the protocol, carries out its effects, and runs users' functions."""

from __future__ import annotations
