"""A text file is written whole, or what was there before stays: a full disk leaves no half of a record behind."""

from __future__ import annotations

import os
from pathlib import Path


def save_text(path: str | Path, text: str) -> Path:
    """Write it; the path. OSError that names the path."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(target)) from error
    return target
