"""Entry points of workers in these tests: `main` calls the function here that `config.cluster` names.

A worker answers by a JSON file `<name>.json` in `config.directory`, which is written atomically.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy.random  # here, so that forks inherit its state

from rpcbench.base.config import WorldConfig


def main(config: WorldConfig) -> None:
    globals()[config.cluster](config)


def answer(config: WorldConfig, **facts) -> None:
    draft = Path(config.directory, f"{config.name}.draft")
    draft.write_text(json.dumps(facts))
    draft.replace(draft.with_suffix(".json"))


def nothing(config: WorldConfig) -> None:
    """Return at once."""


def modules(config: WorldConfig) -> None:
    late = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
    answer(config, late=[name for name in late if name in sys.modules], threads=len(os.listdir("/proc/self/task")))


def leave(config: WorldConfig) -> None:
    print("leaving with seven")
    sys.exit(7)


def fail(config: WorldConfig) -> None:
    raise LookupError("the reason")


def crash(config: WorldConfig) -> None:
    ctypes.string_at(0)


def idle(config: WorldConfig) -> None:
    answer(config, pid=os.getpid())
    while True:
        time.sleep(0.05)  # not one long wait, which a signal just before it would not end


def stubborn(config: WorldConfig) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    idle(config)


def interruptible(config: WorldConfig) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        idle(config)
    except KeyboardInterrupt:
        sys.exit(21)


def parent(config: WorldConfig) -> None:
    child = subprocess.Popen(["sleep", "60"])
    answer(config, pid=os.getpid(), child=child.pid)
    child.wait()


def surroundings(config: WorldConfig) -> None:
    descriptors = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in _open_descriptors()}
    answer(
        config,
        cwd=os.getcwd(),
        environ=dict(os.environ),
        sys_path=sys.path,
        main=sys.modules["__main__"].__dict__.get("__file__"),
        descriptors=descriptors,
        session=os.getsid(0) == os.getpid(),
        interrupt_ignored=signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        defaults=[signal.getsignal(each) == signal.SIG_DFL for each in (signal.SIGTERM, signal.SIGCHLD)],
        secret=config.secret.hex(),
    )


def _open_descriptors() -> list[str]:
    # The listing itself has a descriptor, which is closed before the check.
    return [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]


def draw(config: WorldConfig) -> None:
    import torch

    numbers = [random.random(), numpy.random.random(), torch.rand(()).item()]
    answer(config, numbers=numbers, threads=torch.get_num_threads())


def train(config: WorldConfig) -> None:
    import torch

    torch.set_num_threads(2)
    x = torch.full((512, 512), 0.5, requires_grad=True)
    (x @ x).relu().sum().backward()
    answer(config, threads=torch.get_num_threads(), gradient=x.grad.unique().tolist())
