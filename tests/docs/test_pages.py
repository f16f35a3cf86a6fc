"""Each Python block of README and docs runs: examples (`>>>`) by doctest in `test_reference`, others here, as cells.

A block that cannot run has a line `<!-- not run by the tests: reason -->` before it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sizes import long

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
BLOCK = re.compile(r"(?:^<!-- (.*?) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"not run by the tests: \S.*")
ELSEWHERE = {"docs/past-one-machine.md"}  # in `test_past_one_machine`, and with the tests of Ray
TRAIN = {"docs/parallelism.md"}  # a model in each way
LANGUAGES = {"python", "sh", "toml", "ipython3"}  # the last one is for other front ends, and does not run

BEFORE = {  # code that runs before each cell of a page
    "README.md": """
import torch
from torch import nn
from torch.nn import functional as F
import rpcbench.rpc as rpc

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
x1, y1, x2, y2 = x, y, x, y
train_loader = test_loader = [(x, y)]

def accuracy(output, y):
    return (output.argmax(1) == y).double().mean()
""",
    "docs/collectives.md": """
import tempfile
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
import rpcbench.distributed as dist

model = Linear(2, 2)
if not dist.is_initialized():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/ranks", rank=0, world_size=1)
""",
}
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    shell.run_cell(cell).raise_error()
if "cluster" in shell.user_ns:
    shell.user_ns["cluster"].shutdown()
"""


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (comment before it, language, text) of each block."""
    return BLOCK.findall(PAGES[page])


def cells(page: str) -> list[str]:
    """Return the blocks that must run here."""
    found = [text for comment, kind, text in blocks(page) if kind == "python" and not MARK.fullmatch(comment)]
    return [] if page in ELSEWHERE else [text for text in found if not text.startswith(">>>")]


WITH_CELLS = [page for page in PAGES if cells(page)]


def test_all_blocks_of_all_pages_are_found() -> None:
    assert {"README.md", "docs/collectives.md"} <= set(WITH_CELLS) and PAGES.keys() >= ELSEWHERE
    for page, text in PAGES.items():
        found = blocks(page)
        assert {kind for _, kind, _ in found} <= LANGUAGES, page
        assert len(found) == len(re.findall(r"^```\w", text, re.MULTILINE)), page
        comments = re.findall("<!-- (.*not run.*) -->", text)
        assert [comment for comment, *_ in found if MARK.fullmatch(comment)] == comments, page


@pytest.mark.process
@pytest.mark.parametrize("page", [*(page for page in WITH_CELLS if page not in TRAIN), *long(*TRAIN)])
def test_python_blocks_of_a_page_run(page: str, no_leaks: None) -> None:
    given = [cell for block in cells(page) for cell in (BEFORE.get(page, ""), block)]
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(given), capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
