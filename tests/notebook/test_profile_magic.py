"""`%%profile` through a real kernel: cells here and on workers, the file, errors, and lines that cannot be meant."""

from __future__ import annotations

import json

import pytest
from worlds import until

pytestmark = pytest.mark.process

MM = "import torch\ny = torch.ones(8, 8) @ torch.ones(8, 8)"
CALLS = "{row['operator']: (row['calls'], [*row['workers']]) for row in _.table().rows}['aten::mm']"


def test_a_cell_here_is_profiled_here(kernel):
    for line in ("%%profile", "%%profile notebook"):
        reply = kernel.run(f"{line}\n{MM}")
        assert (reply.status, reply.text) == ("ok", "")
        shown = reply.results[-1]["text/plain"], reply.results[-1]["text/html"].replace("<wbr>", "")
        assert all("aten::mm" in text for text in shown)
        assert reply.results[-1]["text/plain"].startswith("Wall time ")
        assert kernel.value(CALLS) == "(1, ['notebook'])"


def test_a_cell_on_workers_is_profiled_there_and_saved(kernel, tmp_path):
    file = tmp_path / "profile.json"
    reply = kernel.run(f"%%profile worker2 -o y --save {file}\n{MM}")
    assert (reply.status, reply.text) == ("ok", f"{file}: open it at ui.perfetto.dev, or in chrome://tracing.\n")
    assert kernel.value(f"{CALLS}, list(_.members), y.sum().item()") == "((1, ['worker2']), ['worker2'], 512.0)"
    saved = json.loads(file.read_text())["traceEvents"]
    assert [e["pid"] for e in saved if e["ph"] == "X" and e["name"] == "aten::mm"] == [2]
    assert "this cell" in {e["name"] for e in saved if e["ph"] == "b"}


def test_memory_is_counted_by_operator_where_it_is_asked_for(kernel):
    for line, known in (("--memory", 256), ("worker1 --memory", 256), ("worker1", None)):
        assert kernel.run(f"%%profile {line}\n{MM}").text == ""
        found = kernel.value("[row['allocated'] for row in _.table().rows if row['operator'] == 'aten::mm']")
        assert found == f"[{known}]"


def test_all_is_also_the_notebook(kernel):
    assert kernel.run(f"%%profile all\n{MM}").status == "ok"
    assert kernel.value(f"{CALLS}, list(_.members), repr(_.table(by='worker')).split()[0]") == (
        "((2, ['worker1', 'worker2']), ['notebook', 'worker1', 'worker2'], 'worker')"
    )


def test_a_failed_cell_shows_its_profile_and_its_error(kernel):
    for line in ("%%profile", "%%profile worker1"):
        reply = kernel.run(f"{line}\n{MM}\n1 / 0")
        assert (reply.status, reply.ename) == ("error", "ZeroDivisionError")
        assert "aten::mm" in reply.results[-1]["text/plain"]


def test_a_name_of_the_notebook_alone_is_said_to_be_one_and_a_plain_cell_is_profiled(kernel):
    work = "cluster.run('all', 'import torch; torch.ones(3) @ torch.ones(3)')"
    assert kernel.run(f"import rpcbench\ndef of_here():\n    return {work}").status == "ok"
    reply = kernel.run("%%profile all\nof_here()")
    assert (reply.status, reply.ename) == ("error", "NameError")
    said = reply.traceback
    assert "of_here is a variable of the notebook" in said and 'with rpcbench.profile("all") as p:' in said
    assert kernel.run('with rpcbench.profile("all") as p:\n    of_here()\np').status == "ok"
    assert "aten::dot" in kernel.value("[row['operator'] for row in p.table().rows]")
    assert "of the notebook" not in kernel.run("%%profile all\nnowhere_at_all").traceback


def test_a_stopped_cell_shows_its_profile_and_the_next_one_runs(kernel):
    reply = kernel.run(f"%%profile worker1\n{MM}\nimport time\nprint('ready')\ntime.sleep(60)", stop_at=[["ready"]])
    assert reply.ename == "KeyboardInterrupt" and "aten::mm" in reply.results[-1]["text/plain"]
    assert kernel.run(f"%%profile worker1\n{MM}").status == "ok"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("worker9", "could not find destination name worker9: did you mean worker2?"),
        ("worker1 --save /no/such/place/p.json", "--save /no/such/place/p.json: there is no folder /no/such/place"),
        ("worker1 --async", "--async returns before the cell has ended"),
        ("worker1 --sav", "expected one argument"),
        ("worker1 --nosuch", "%%remote has no option --nosuch"),
    ],
)
def test_a_line_that_cannot_be_meant_is_an_error_before_anything_runs(kernel, line, fault):
    reply = kernel.run(f"%%profile {line}\nprint('ran')")
    assert reply.status == "error" and fault in reply.evalue + reply.traceback and "ran\n" not in reply.text


def test_tab_offers_the_words_of_the_line(kernel):
    assert {"worker1", "all", "notebook", "--save", "--timeout"} <= set(kernel.complete("%%profile |")[0])
    until(lambda: kernel.complete("%%profile worker1\nz_of_there = 1\nz_of_th|")[0] == [])  # a worker may be late
    assert kernel.run("%%remote worker1\nz_of_there = 1").status == "ok"
    until(lambda: "z_of_there" in kernel.complete("%%profile worker1\nz_of_th|")[0])
