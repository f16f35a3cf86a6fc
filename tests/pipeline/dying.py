"""A step in which a worker dies: its data and its error. The worker writes the time of its death into a file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from rpcbench.base.errors import StageLostError
from rpcbench.pipeline import Pipeline

SECONDS = 30.0
"""The goal is one second; on a busy machine the leader waits up to 5 s for the reason of the death, and without a
report of the death the driver of these tests waits a minute."""


def data() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.rand(13, 6, generator=made), torch.rand(13, 6, generator=made)


def die(sign: str) -> None:
    """End this process, after a note of the time."""
    Path(sign).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def killed(pipe: Pipeline, sign: Path) -> StageLostError:
    """Run a step in which a worker dies; return its error, which must come soon after the death."""
    with pytest.raises(StageLostError) as caught:
        pipe.step(*data())
    assert time.monotonic() - float(sign.read_text()) < SECONDS
    return caught.value
