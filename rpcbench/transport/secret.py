"""The secret of a world on several hosts: a file that its user makes once and copies to every host.

It holds 64 hexadecimal digits and nothing else: TLS keys are made from it, so it must not be one that can be guessed.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from rpcbench.base.errors import RpcError
from rpcbench.transport.rundir import check_private

VARIABLE = "RPCBENCH_SECRET_FILE"
_BYTES = 32


def make(path: Path) -> None:
    """A new secret in a new file that only its user can read. FileExistsError where there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(_BYTES) + "\n")


def load() -> bytes | None:
    """The secret in the file that RPCBENCH_SECRET_FILE names; None where it names none.

    Errors: FileNotFoundError, PermissionError if others may read it, ValueError if it holds anything else.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    path = Path(name)
    with path.open() as file:
        check_private(path, os.fstat(file.fileno()))
        text = file.read(1000).strip()
    try:
        secret = bytes.fromhex(text)
        if len(secret) != _BYTES:
            raise ValueError
    except ValueError:
        raise ValueError(f"{path} does not hold a secret; make one with: rpcbench secret {path}") from None
    return secret


def demand(host: str) -> RpcError:
    """What to say to a user whose world needs a secret and has none."""
    return RpcError(
        f"{host} is reached over the network, and whoever gets in can run code here, so all workers must share a "
        f"secret. Make one with: rpcbench secret ~/.rpcbench-secret; copy the file to every host, and set "
        f"{VARIABLE}=~/.rpcbench-secret for every worker"
    )
