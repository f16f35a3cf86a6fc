"""Each right column of docs/from-others.md runs, row by row, as cells of a notebook; each library has its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-others.md").read_text()
ROW = re.compile(r"^\| .* \| `([^|]+)` \|$", re.MULTILINE)
BEFORE = """import rpcbench
def f(x):
    return x + 1
def g():
    return 7
items = [1, 2, 3, 4]
class Counter:
    def __init__(self, start):
        self.count = start
    def add(self, more):
        self.count += more
        return self.count
def train():
    import torch
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return total.item()"""
RESULTS = {
    'cluster.rpc_sync("worker2", f, (3,))': 4,
    'cluster.rpc_async("worker2", f, (3,)).wait()': 4,
    "[cluster.rpc_sync(name, f, (3,)) for name in cluster.workers]": [4, 4],
    'cluster["worker2"]["x"]': 3,
    'cluster.gather("y")': [1, 2, 3, 4],
    "list(cluster.map(f, items))": [2, 3, 4, 5],
    "cluster.submit(f, 3).result()": 4,
    "{name: cluster.rpc_sync(name, g) for name in cluster.workers}": {"worker1": 7, "worker2": 7},
    "[each.wait() for each in [counter.rpc_async().add(1) for counter in counters]]": [11, 11],
    "counters[1].rpc_sync().add(5)": 16,
    "cluster.spmd(train)": [2.0, 2.0],
}
"""What some of the rows give."""
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell, results = InteractiveShell.instance(), {}
before, rows = json.load(sys.stdin)
for cell in before:
    shell.run_cell(cell).raise_error()
for row in rows:
    cell = f"{row}\\n1" if row.startswith("%%") else row
    ran = shell.run_cell(cell)
    ran.raise_error()
    results[row] = ran.result
print(json.dumps(results, default=str), file=sys.stderr)
if "cluster" in shell.user_ns:
    shell.user_ns["cluster"].shutdown()
"""


def rows_by_library() -> dict[str, list[str]]:
    parts = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:]
    return {name: ROW.findall(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_each_row_is_read() -> None:
    found = rows_by_library()
    assert [name.split()[0] for name in found] == ["nbdistributed", "ipyparallel", "Dask", "Monarch"]
    assert sum(map(len, found.values())) == len(re.findall(r"^\| ", PAGE, re.MULTILINE)) - len(found), "without heads"
    assert RESULTS.keys() <= {row for rows in found.values() for row in rows}


@pytest.mark.process
@pytest.mark.parametrize("library", rows_by_library())
def test_all_rows_of_a_library_run(library: str, no_leaks: None) -> None:
    rows = rows_by_library()[library]
    given = json.dumps([["%load_ext rpcbench", BEFORE], rows])
    how = {"capture_output": True, "text": True, "timeout": 240, "cwd": ROOT}
    ran = subprocess.run([sys.executable, "-c", RUN], input=given, **how)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = json.loads(ran.stderr.splitlines()[-1])
    assert {row: value for row, value in results.items() if row in RESULTS} == {
        row: value for row, value in RESULTS.items() if row in rows
    }
