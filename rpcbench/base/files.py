"""Files that others may read at any time: each is whole, or is not there.

Guarantees
- A new file is complete and on disk when its block ends. None is left if the block, or the disk, fails.
- A file that is replaced has its old content or its new one, after a crash, too. The new one is written beside it, as a
  draft, and takes its name at the end.
- Only `replace_file` and `rename_draft` overwrite a file that exists.
- `durable=False` is for files that do not outlive a crash of the machine anyway: nothing waits for the disk then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def make_file(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Make a new file, and yield it to write to. FileExistsError if there is one."""
    try:
        with path.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())  # complete on disk before it gets its name, or another file names it
    except FileExistsError:
        raise
    except BaseException:
        with contextlib.suppress(OSError):  # it may not even have been made
            path.unlink()
        raise


@contextlib.contextmanager
def replace_file(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a draft to write to, or to name (`name`) to other writers; it takes the name `path` when the block ends."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    with make_file(draft, durable) as file:
        yield file
    try:
        rename_draft(draft, path, durable)
    except BaseException:
        draft.unlink(missing_ok=True)  # it is there no more if only the folder's fsync failed
        raise


def rename_draft(draft: Path, path: Path, durable: bool = True) -> None:
    """Give a complete draft its name, in place of a file or an empty folder that has it."""
    draft.replace(path)
    if not durable:
        return
    directory = os.open(path.parent, os.O_RDONLY)  # the rename itself is on disk only after this fsync
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
