"""For tests of programs that use rpcbench: faults on purpose.

`Faults` is a link that loses, delays, repeats, holds and refuses messages; `install` puts it into a worker that runs.
`FaultyTensorPipeRpcBackendOptions(faults=...)` brings it along to `init_rpc`; its other options are torch's own.
`Drill` puts faults into all members at once. `Stepper` holds the messages of all members and lets them go one by one,
while clocks stand still.
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
    "FAULTY",
    "KINDS",
    "Drill",
    "Faults",
    "FaultyTensorPipeRpcBackendOptions",
    "Held",
    "Stepper",
    "backend",
    "backend_options",
    "faulty_backend",
    "faulty_options",
    "install",
]
