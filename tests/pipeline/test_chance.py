"""Random numbers of stages where several run at once in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CROWD = """
import gc, threading, torch
from rpcbench.pipeline.chance import seeded

class Circle:
    def __init__(self):
        self.me, self.tensor = self, torch.ones(3)

def work():
    for number in range(1000):
        Circle()
        with seeded(number):
            pass

gc.set_threshold(5)  # so that torch's tensor of a state sets off collections, which free tensors
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


@pytest.mark.process
def test_forwards_of_several_threads_do_not_lock_each_other_out() -> None:
    """It takes two seconds, or for ever; no thread could end it then."""
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr
