"""Each RRef knows the cell of the notebook that made it, here or on a worker; what no cell made has none."""

from __future__ import annotations

import ast

HERE = """
import rpcbench.rpc as rpc
from rpcbench.runtime.current import current_agent
def made_by():
    return {rref: (row["number"], row["cell"]) for rref, row in current_agent().tables()["owned"].items()}
def make_one():
    made = rpc.remote("worker2", int)
    made.to_here()
    return made
def made_on(worker, rref):
    return cluster.rpc_sync(worker, made_by)[f"{rref._rref}"]
"""


def value(kernel, code):
    reply = kernel.run(code)
    assert reply.status == "ok", reply.traceback
    return ast.literal_eval(reply.results[-1]["text/plain"])


def test_a_cell_that_makes_an_rref_is_known_to_its_owner(kernel):
    assert kernel.run(HERE).status == "ok"
    first = value(kernel, "there = rpc.remote('worker1', int)\nthere.to_here()\nlen(In) - 1")
    assert value(kernel, "made_on('worker1', there)") == (first, "")
    second = value(kernel, "mine = rpc.RRef(3)\nlen(In) - 1")
    value(kernel, "keeper = rpc.remote('worker1', list, ([mine],))\nlen(keeper.to_here())")
    assert value(kernel, "made_by()[f'{mine._rref}']") == (second, "")


def test_a_cell_on_a_worker_is_the_notebooks_cell_that_sent_it(kernel):
    assert kernel.run(HERE).status == "ok"
    there = "import rpcbench.rpc as rpc\ntheirs = rpc.remote('worker2', int)\ntheirs.to_here()"
    assert kernel.run(f"%%remote worker1 -o theirs\n{there}").status == "ok"
    sent = value(kernel, "len(In) - 2")
    assert value(kernel, "made_on('worker2', theirs)") == (sent, "")


def test_what_a_call_makes_that_no_cell_ran_has_no_cell(kernel):
    assert kernel.run(HERE).status == "ok"
    assert kernel.run("called = cluster.rpc_sync('worker1', make_one)").status == "ok"
    assert value(kernel, "made_on('worker2', called)") == (None, "")
