"""Remote modules whose class a cell of a real notebook defines: the workers know nothing of it until it is sent."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

DEFINED = """
import copy
import torch
from torch import nn
from rpcbench import autograd, rpc
from rpcbench.nn import RemoteModule
from rpcbench.optim import DistributedOptimizer

FACTOR = 3.0

class Layer(nn.Module):
    '''Uses a global of the notebook, a submodule, and its mode.'''
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.9)
    def forward(self, x):
        return self.drop(self.inner(x) * FACTOR)

def modes(rref):
    return [part.training for part in rref.local_value().modules()]

def found(name):
    import __main__
    return getattr(__main__, name)

x = torch.ones(8, 4)
beside = Layer(4).eval()
"""


@pytest.fixture(scope="module")
def cells(kernel):
    """The kernel, with a class of module and the same module here."""
    assert kernel.run(DEFINED).status == "ok"
    yield kernel
    assert kernel.run("module = anew = held = optimizer = parameters = None").status == "ok"


def made(cells):
    reply = cells.run("module = RemoteModule('worker1', Layer, (4,)).eval()")
    assert reply.status == "ok", reply.traceback


def test_it_runs_on_the_worker_and_gives_what_it_gives_here(cells):
    made(cells)
    assert cells.value("torch.equal(module(x), beside(x)), module.module_rref.owner_name()") == "(True, 'worker1')"


def test_train_and_eval_switch_its_submodules(cells):
    made(cells)
    cells.run("module.train()")
    assert cells.value("module.training, bool((module(x) == 0).any())") == "(True, True)"
    assert cells.value("rpc.rpc_sync('worker1', modes, (module.module_rref,))") == "[True, True, True]"
    cells.run("module.eval()")
    assert cells.value("module.training, torch.equal(module(x), beside(x))") == "(False, True)"


def test_it_moves_to_a_worker_that_has_never_seen_its_class(cells):
    made(cells)
    cells.run("moved = module.to('worker2')")
    assert cells.value("moved is module, module.on, torch.equal(module(x), beside(x))") == "(True, 'worker2', True)"
    assert cells.value("{p.owner_name() for p in module.remote_parameters()}") == "{'worker2'}"
    assert cells.value("rpc.rpc_sync('worker2', modes, (module.module_rref,))") == "[False, False, False]"


def test_it_trains_as_it_would_here(cells):
    made(cells)
    step = """
parameters = module.remote_parameters()
optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
with autograd.context() as context:
    autograd.backward(context, [module(x).square().mean()])
    optimizer.step(context)
local = copy.deepcopy(beside)
local(x).square().mean().backward()
torch.optim.SGD(local.parameters(), lr=0.1).step()
"""
    assert cells.run(step).status == "ok"
    same = "all(torch.allclose(there.to_here(), here) for there, here in zip(parameters, local.parameters()))"
    assert cells.value(f"{same}, torch.equal(beside.inner.weight, local.inner.weight)") == "(True, False)"


def test_a_class_defined_again_is_another_and_leaves_the_first_alone(cells):
    made(cells)
    reply = cells.run("class Layer(nn.Module):\n    def forward(self, x):\n        return x + 100")
    assert reply.status == "ok", reply.traceback
    cells.run("anew = RemoteModule('worker1', Layer)")
    assert cells.value("anew(torch.ones(2)).tolist(), torch.equal(module(x), beside(x))") == "([101.0, 101.0], True)"
    assert cells.run(DEFINED).status == "ok"


def test_a_module_that_a_remote_cell_has_made(cells):
    cell = "import torch\nclass Own(torch.nn.Module):\n    def forward(self, x):\n        return x * 5\nown = Own()"
    assert cells.run(f"%%remote worker1\n{cell}").status == "ok"
    hold = "held = RemoteModule.init_from_module_rref('worker1', rpc.remote('worker1', found, ('own',))).eval()"
    reply = cells.run(hold)
    assert reply.status == "ok", reply.traceback
    assert cells.value("held(torch.ones(2)).tolist()") == "[5.0, 5.0]"
    assert cells.value("%remote worker1 own.training") == "False"
    assert cells.run("held.to('worker2')").status == "ok"
    assert cells.value("held(torch.ones(2)).tolist(), held.on") == "([5.0, 5.0], 'worker2')"


def test_a_module_that_cannot_be_made_says_why(cells):
    reply = cells.run("RemoteModule('worker1', Layer, ('wide',))(x)")
    assert reply.status == "error" and reply.ename == "TypeError"
    assert "Layer" in reply.traceback or "Linear" in reply.traceback
