"""Parts of Jupyter that only some features need: where one is missing, the error says how to get it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from IPython.core.error import UsageError


@contextlib.contextmanager
def needs(what: str, *packages: str) -> Iterator[None]:
    """For imports: UsageError where one of these packages is not installed. What else cannot be imported is a bug."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise UsageError(f"{what} needs {error.name}: pip install {' '.join(packages)}") from None
