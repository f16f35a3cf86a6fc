"""The functions of the three processes of `test_three_processes`, with one that breaks the protocol."""

from __future__ import annotations

from typing import Any

import pytest
from mutants import parents_do_not_wait_for_children

from rpcbench.rpc import RRef
from rpcbench.runtime import current
from rpcbench.testing import Faults, install

_patch = pytest.MonkeyPatch()
_faults: list[Faults] = []


def disturb() -> None:
    """Install faults in this process."""
    _faults.append(install(Faults(retry_seconds=0.2)))


def hold(kind: str) -> None:
    _faults[-1].hold(kind)


def held() -> int:
    return len(_faults[-1].held)


def release() -> None:
    _faults[-1].release()


def history() -> list[str]:
    return _faults[-1].history


def owned() -> int:
    """Return how many values this process keeps for others."""
    return len(current.current_agent().tables()["owned"])


def remembered() -> int:
    """Return how many values this process still finds if an RRef of one arrives."""
    return len(current.current_agent().calls.values._known)


def make() -> list[int]:
    return [1, 2, 3]


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here(timeout=5)


def break_child_accept() -> None:
    """Break the protocol for the rest of this process."""
    parents_do_not_wait_for_children(_patch)
