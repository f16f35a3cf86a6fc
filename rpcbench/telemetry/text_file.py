"""A text file is written whole, or the file of before stays: a full disk leaves no half of a record behind."""

from __future__ import annotations

import secrets
from pathlib import Path


def save_text(path: str | Path, text: str) -> Path:
    """Write it; the path. OSError that names the path. A pipe or a device is written to directly."""
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return Path(path)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    return Path(path)
