"""Fault injection, for tests of programs that use rpcbench.

`Faults` is a link that loses, delays, duplicates, holds and refuses messages; `install` adds it to a running worker.
`FaultyTensorPipeRpcBackendOptions(faults=...)` passes it to `init_rpc`; its other options are torch's own.
`Drill` injects faults at all members at once. `Stepper` holds the messages of all members and delivers them one at a
time, while all clocks stand still.
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
from rpcbench.testing.stepper import Held, Stepper

__all__ = [
    "FAULTY", "KINDS", "Drill", "Faults", "FaultyTensorPipeRpcBackendOptions", "Held", "Stepper", "backend",
    "backend_options", "faulty_backend", "faulty_options", "install",
]  # fmt: skip
