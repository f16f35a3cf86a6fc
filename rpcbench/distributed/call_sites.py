"""The module or line that asks for a collective of torch, for the table "collectives".

Guarantees
- A look walks the Python stack of this thread, without a text: that is made only when a row is shown.
- FSDP's collectives name the part of the model, those of DistributedDataParallel and of other backward passes, which
  no line of the program calls, say so. All others name the innermost line of the program.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from types import FrameType
from typing import NamedTuple

from rpcbench.runtime.handles import CreationSite, is_the_users

_FSDP = "_fsdp_param_group.py"
_DDP = "nn/parallel/distributed.py"
_OWN_FRAMES = 2  # of this function's callers, which belong to the kernel


class CallSite(NamedTuple):
    """The place of a call: what asked, and the line of the program, where there is one."""

    asker: str
    line: CreationSite | None

    def __str__(self) -> str:
        """Return `FSDP layers.0`, `train.py:12`, or `DistributedDataParallel, train.py:12`."""
        return ", ".join(filter(None, (self.asker, "" if self.line is None else self.line.place)))


def calling_site() -> CallSite:
    """Return the place at which this thread calls torch."""
    frame: FrameType | None = sys._getframe(_OWN_FRAMES)
    asker = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_the_users(file):
            return CallSite(asker, CreationSite(frame.f_code, frame.f_lasti))
        kind = _asker_in(file)
        if kind == "FSDP" and (name := _name_of_unit(frame)) is not None:
            return CallSite(f"FSDP {name}".rstrip(), None)
        asker = asker or kind
        frame = frame.f_back
    return CallSite(asker or "backward", None)


@lru_cache(maxsize=4096)
def _asker_in(file: str) -> str:
    if file.endswith(_FSDP):
        return "FSDP"
    return "DistributedDataParallel" if file.endswith(_DDP) else ""


def _name_of_unit(frame: FrameType) -> str | None:
    """Return the path of the module that a group of FSDP's parameters belongs to; empty for the root."""
    group = frame.f_locals.get("self")
    return None if group is None else str(getattr(group, "_module_fqn", None) or "")
