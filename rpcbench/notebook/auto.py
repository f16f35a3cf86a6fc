"""`%autoremote worker1`: cells run there, without a first line that says so, until `%autoremote off`.

Rules
- A cell that begins with a magic of its own (`%%…`, `%cluster`, `%remote`, `%panel`, …) runs as it says.
- Whoever reads the notebook sees where a cell ran: its lines begin with the worker's name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_OURS = ("%cluster", "%remote", "%autoremote", "%panel", "%record", "%debug ")
_OWN = ("%%", *_OURS, "%load_ext", "%unload_ext", "%reload_ext")


class AutoRemote:
    """A transformer of input lines, for IPython's `input_transformers_cleanup`."""

    def __init__(self) -> None:
        self.targets = ""
        """As `%%remote` takes them; empty: cells run here."""

    def __call__(self, lines: list[str]) -> list[str]:
        if self.before("".join(lines)) is None:
            return lines
        return [f"%%remote --label {self.targets}\n", *lines]

    def before(self, code: str) -> str | None:
        """Where the cell goes; None where it runs as it says."""
        first = code.lstrip()
        return self.targets if self.targets and first and not first.startswith(_OWN) else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside runs here."""
        targets, self.targets = self.targets, ""
        try:
            yield
        finally:
            self.targets = targets
