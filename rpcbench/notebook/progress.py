"""A line that says how many workers serve while they start: one display that changes, in plain text."""

from __future__ import annotations

from IPython.display import DisplayHandle

_WIDTH = 20


class Starting:
    """Shown when it is made; call it with how many serve, and of how many."""

    def __init__(self, of: int) -> None:
        self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
        self._told = 0
        self._handle.display(_bundle(0, of), raw=True)  # type: ignore[no-untyped-call]

    def __call__(self, serve: int, of: int) -> None:
        if serve != self._told:
            self._told = serve
            self._handle.update(_bundle(serve, of), raw=True)  # type: ignore[no-untyped-call]


def _bundle(serve: int, of: int) -> dict[str, str]:
    full = _WIDTH * serve // of
    return {"text/plain": f"{'█' * full}{'░' * (_WIDTH - full)} {serve} of {of} workers serve"}
