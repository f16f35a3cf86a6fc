"""For tests of programs that use rpcbench: faults on purpose.

`Faults` is a link that loses, delays, repeats, holds and refuses messages; `install` puts it into a worker that runs.
"""

from __future__ import annotations

from rpcbench.testing.faults import Faults, install

__all__ = ["Faults", "install"]
