"""What two processes must have in common to understand each other, and what they had better have in common."""

from __future__ import annotations

import platform
import warnings
from typing import NamedTuple

import cloudpickle
import torch

from rpcbench.base.config import PROTOCOL
from rpcbench.base.errors import VersionMismatch


class Versions(NamedTuple):
    """Of one process. Functions that travel by value need the same minor version of Python."""

    protocol: int
    python: str
    torch: str
    cloudpickle: str

    @property
    def needed(self) -> tuple[int, list[str]]:
        """What must be the same."""
        return self.protocol, self.python.split(".")[:2]

    def __str__(self) -> str:
        return f"protocol {self.protocol}, Python {self.python}, torch {self.torch}, cloudpickle {self.cloudpickle}"


HERE = Versions(PROTOCOL, platform.python_version(), str(torch.__version__), cloudpickle.__version__)


def check(mine: Versions, theirs: Versions, who: str) -> None:
    """VersionMismatch where the two cannot talk to each other."""
    if mine.needed != theirs.needed:
        raise VersionMismatch(str(mine), str(theirs), who)


def warn(mine: Versions, theirs: Versions, who: str) -> None:
    """A warning that names the packages in which the two differ, where that may only do harm."""
    for package in ("torch", "cloudpickle"):
        here, there = getattr(mine, package), getattr(theirs, package)
        if here != there:
            warnings.warn(
                f"{who} has {package} {there}, this process {here}: what one of them sends, the other may not read",
                RuntimeWarning,
                stacklevel=2,
            )
