"""`%record` through a real kernel, and its record played in a kernel that has no cluster."""

from __future__ import annotations

import re

import pytest
from kinds import kernel_is_long

pytestmark = pytest.mark.process


@kernel_is_long
def test_a_lesson_is_recorded_and_plays_without_a_cluster(kernel, tmp_path):
    file = tmp_path / "lesson.json"
    assert kernel.run(f"%record {file}").text == f"Recording to {file} until %record stop.\n"
    assert "is running" in kernel.run(f"%record {file}").evalue
    assert kernel.run("%%remote worker1 --rref held\nheld = {'a': 1}").status == "ok"
    assert kernel.run("%record mark the end").text == "Marked.\n"
    said = kernel.run("%record stop").text
    assert said.startswith(f"{file}: record of ") and f'rpcbench.replay("{file}")' in said
    members = re.search(r"\d+ members", said)[0]
    assert "nothing is recorded" in kernel.run("%record stop").evalue
    assert "name the file" in kernel.run("%record --nonsense").evalue
    alone = type(kernel)()
    try:
        code = f"import rpcbench\np = rpcbench.replay('{file}', 'messages')\np.go(10_000)\nprint(p)\np"
        reply = alone.run(code)
        assert reply.status == "ok", reply.traceback
        assert "notebook → worker1: run this cell" in reply.text and reply.text.startswith(members)
        widget, page = reply.results[-2:]
        assert "application/vnd.jupyter.widget-view+json" in widget and "without a kernel" in page["text/html"]
    finally:
        alone.close()
