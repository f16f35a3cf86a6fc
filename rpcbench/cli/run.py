"""`rpcbench run script.py [arguments]`: a program written for torch.distributed.rpc, unchanged, on our runtime.

This process becomes the program; so do signals, exit status and output. Processes that it starts are bound, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rpcbench.base.errors import RpcError
from rpcbench.torch_shim import environment


def run(arguments: Sequence[str]) -> None:
    """Run a script, or with -m a module, with its arguments. RpcError where there is none."""
    if not arguments:
        raise RpcError("name a script, or a module with -m: rpcbench run script.py [arguments]")
    if arguments[0] != "-m" and not Path(arguments[0]).is_file():
        raise RpcError(f"there is no script {arguments[0]}")
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment(os.environ))
