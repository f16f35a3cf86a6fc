"""Fault injection, for tests of programs that use rpcbench.

`Faults` is a link that loses, delays, duplicates, holds and refuses messages; `install` adds it to a running worker.
`FaultyTensorPipeRpcBackendOptions(faults=...)` passes it to `init_rpc`; its other options are torch's own.
`Drill` injects faults at all members at once. `Stepper` holds the messages of all members and delivers them one at a
time, while all clocks stand still. `assert_same_training` compares a parallel program with one process.
"""

from __future__ import annotations

from rpcbench.testing.backend import (
    FAULTY,
    KINDS,
    FaultyTensorPipeRpcBackendOptions,
    backend,
    backend_options,
    faulty_backend,
    faulty_options,
)
from rpcbench.testing.faults import Drill, Faults, install
from rpcbench.testing.same_training import assert_same_training
from rpcbench.testing.stepper import Held, Stepper

__all__ = [
    "FAULTY", "KINDS", "Drill", "Faults", "FaultyTensorPipeRpcBackendOptions", "Held", "Stepper",
    "assert_same_training", "backend", "backend_options", "faulty_backend", "faulty_options", "install",
]  # fmt: skip
