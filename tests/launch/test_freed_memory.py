"""Memory that a process of a world frees stays with the process: the next step reuses it without new page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc that learns")

_ROUNDS = 20
_MEGABYTES = 6
_PAGES = _MEGABYTES << 20 >> 12

STEPS = f"""
import resource

def pages():
    '''Touched for the first time in each of some steps, which make and drop 6 blocks of a megabyte.'''
    def step():
        return [bytearray(b"x") * (1 << 20) for _ in range({_MEGABYTES})]

    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({_ROUNDS}):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / {_ROUNDS}
"""
ALONE = f"""
{STEPS}
from rpcbench.runtime.timers import keep_freed_memory
before = pages()
keep_freed_memory()
print(before, pages())
"""
CLUSTER = f"""
{STEPS}
import rpcbench
if __name__ == "__main__":
    with rpcbench.Cluster(1) as cluster:
        print(pages(), cluster.rpc_sync("worker1", pages))
"""


def figures(script: str, **settings: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=os.environ | settings
    )
    return [float(each) for each in done.stdout.split()]


def test_a_process_that_keeps_freed_memory_has_no_repeated_page_faults() -> None:
    before, after = figures(ALONE)
    assert before > _PAGES / 2 and after < _PAGES / 20


def test_a_malloc_threshold_of_the_user_is_kept() -> None:
    _, after = figures(ALONE, MALLOC_TRIM_THRESHOLD_="131072")
    assert after > _PAGES / 2


@pytest.mark.long
def test_the_driver_and_workers_keep_freed_memory() -> None:
    driver, worker = figures(CLUSTER)
    assert max(driver, worker) < _PAGES / 20
