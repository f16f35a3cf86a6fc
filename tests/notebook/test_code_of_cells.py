"""Functions and classes of cells in calls: on a worker they are as in the notebook, with their names and sources."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

DEFINED = """from __future__ import annotations
import dataclasses, inspect, io, multiprocessing, pickle, typing
import torch
from rpcbench import rpc

@dataclasses.dataclass
class Args:
    rate: typing.Optional[float] = None
    inner: list[Args] = dataclasses.field(default_factory=list)

class Net(torch.nn.Linear):
    pass

def double(x):
    if x > 0:
        return x * 2
    return x

def saved():
    torch.save(Net(2, 2), file := io.BytesIO())
    file.seek(0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        doubled = pool.map(double, [1, 2])
    loaded = torch.load(file, weights_only=False), pickle.loads(pickle.dumps(Args(1.0)))
    return type(loaded[0]) is Net, doubled, loaded[1] == Args(1.0)

def read():
    script = torch.jit.script(double)
    return inspect.getsource(double)[:15], int(script(torch.tensor(3))), sorted(typing.get_type_hints(Args))

def gathered():
    torch.distributed.all_gather_object(every := [None] * 2, Args())
    return [isinstance(each, Args) for each in every]
"""


@pytest.fixture(scope="module")
def cells(kernel):
    """The kernel, after a cell that defines them."""
    assert kernel.run(DEFINED).status == "ok"
    return kernel


def test_other_code_finds_them_by_their_names(cells):
    assert cells.value("rpc.rpc_sync('worker1', saved)") == "(True, [2, 4], True)"
    assert cells.value("cluster.spmd(gathered)") == "[[True, True], [True, True]]"
    assert cells.value("next(iter(cluster.map(lambda _: saved(), [0])))") == "(True, [2, 4], True)"
    reply = cells.run("%%remote worker1\nNet")
    assert reply.ename == "NameError"  # a cell's own names are as before


def test_they_have_their_sources_and_types(cells):
    assert cells.value("rpc.rpc_sync('worker1', read)") == "('def double(x):\\n', 6, ['inner', 'rate'])"


def test_a_remote_traceback_has_the_cell_and_the_line(cells):
    cell = f"Cell In[{int(cells.value('len(In)'))}]"
    assert cells.run("def fail():\n    return 1 / 0").status == "ok"
    told = cells.run("from rpcbench import rpc\nrpc.rpc_sync('worker1', fail)").traceback
    assert f"  {cell}, line 2, in fail\n    return 1 / 0\n" in told
    told = cells.run("%%remote worker2 -i fail\nfail()").traceback
    assert f"{cell}, line 2, in fail()\n" in told and "----> 2     return 1 / 0" in told
