"""`%%trace` through a real kernel: the messages that a cell caused, here and on workers, and nothing else."""

from __future__ import annotations

import ast

import pytest

pytestmark = pytest.mark.process

ROWS = "[(m['from'], m['to'], m['kind'], m['label'], m['state']) for m in {}.state['view']['messages'].values()]"


def rows(kernel, panel="_"):
    """The messages of the panel that a cell has left, which it has at once."""
    return ast.literal_eval(kernel.value(ROWS.format(panel)))


def of(kind, found):
    return [row for row in found if row[2] == kind]


def test_a_cell_here_shows_its_calls_with_both_ends(kernel):
    kernel.run("import operator\nfrom rpcbench import rpc\nrpc.rpc_sync('worker2', int)")
    reply = kernel.run("%%trace\nprint(rpc.rpc_sync('worker1', operator.neg, (3,)))")
    assert (reply.status, reply.text) == ("ok", "-3\n")
    assert "application/vnd.jupyter.widget-view+json" in reply.results[-2]
    found = rows(kernel)
    assert of("Call", found) == [(0, 1, "Call", "neg", "received")]
    assert of("Result", found) == [(1, 0, "Result", "neg", "received")]


def test_calls_between_workers_are_seen_from_the_notebook(kernel):
    code = "from rpcbench import rpc\nrpc.rpc_sync('worker2', abs, (-2,))"
    for cell in (f"%%trace worker1\n{code}", f"%%trace\n%%remote worker1\n{code}"):
        assert kernel.run(cell).status == "ok"
        found = of("Call", rows(kernel))
        assert (1, 2, "Call", "abs", "received") in found
        assert [row[:2] for row in found if row[3] == "this cell"] == [(0, 1)]


def test_an_rref_is_followed_to_its_end(kernel):
    there = "return {*current.current_agent().tables()['owned']}"
    kernel.run(f"from rpcbench import rpc\ndef owned():\n    from rpcbench.runtime import current\n    {there}")
    code = "import time\nbefore = rpc.rpc_sync('worker1', owned)\nr = rpc.remote('worker1', dict)\nr.to_here()\ndel r\n"
    reply = kernel.run(f"%%trace\n{code}while rpc.rpc_sync('worker1', owned) - before:\n    time.sleep(0.01)")
    assert reply.status == "ok"
    kinds = {row[2] for row in rows(kernel)}
    assert {"Create", "Fetch", "Result", "UserDelete"} <= kinds


def test_an_error_is_raised_and_its_messages_are_shown(kernel):
    reply = kernel.run("%%trace\nrpc.rpc_sync('worker1', operator.truediv, (1, 0))")
    assert (reply.status, reply.ename) == ("error", "ZeroDivisionError")
    assert any("application/vnd.jupyter.widget-view+json" in data for data in reply.results)


def test_the_cell_can_be_stopped_and_then_nobody_listens(kernel):
    reply = kernel.run("%%trace\nimport time\nprint('ready')\ntime.sleep(60)", stop_at=[["ready"]])
    assert reply.ename == "KeyboardInterrupt"
    told = "current.current_agent().machine.read_node(lambda node: node.delivery.observer)"
    look = "import time\nfrom rpcbench.runtime import current"
    quiet = f"{look}\nwhile {told} is not None: time.sleep(0.01)\nprint('quiet')"
    for where in ("", "%%remote worker1\n", "%%remote worker2\n"):
        assert kernel.run(where + quiet).text == "quiet\n"
