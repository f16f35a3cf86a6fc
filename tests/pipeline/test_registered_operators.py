"""Operators that a library or a notebook has registered, in traced models on workers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import small
import torch
from torch import Tensor, nn
from torch.nn import functional

from rpcbench.base.errors import PipelineError
from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import Pipeline, split, traced
from rpcbench.pipeline.registered_operators import OperatorName
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

DECORATED = """
import torch

@torch.library.custom_op("{space}::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
DEFINED = """
import torch

torch.library.define("{space}::double", "(Tensor x) -> Tensor")
torch.library.impl("{space}::double", "CPU")(lambda x: x * 2)

@torch.library.register_fake("{space}::double")
def _(x):
    return torch.empty_like(x)
"""


@pytest.mark.parametrize("source", [DECORATED, DEFINED])
def test_the_module_that_registers_an_operator_is_found_and_imported(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "decorated" if source is DECORATED else "defined"
    for name in (f"{kind}_here", f"{kind}_there"):
        (tmp_path / f"{name}.py").write_text(source.format(space=name))
    monkeypatch.syspath_prepend(tmp_path)
    there = OperatorName(f"{kind}_there.double.default", f"{kind}_there")
    assert there.find_operator()(torch.ones(1)) == 2
    here = OperatorName(f"{kind}_here.double.default", f"{kind}_here")
    here.find_operator()
    assert (
        OperatorName.from_overload(there.find_operator()) == there
        and OperatorName.from_overload(here.find_operator()) == here
    )


def test_operators_of_torch_need_no_module() -> None:
    assert OperatorName.from_overload(torch.ops.aten.add.Tensor) == OperatorName("aten.add.Tensor")
    assert OperatorName("aten.add.Tensor").find_operator() is torch.ops.aten.add.Tensor


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("", "worker1 has not registered: import the library that registers it there"),
        ("__main__", "worker1 has not registered: run the cell or the lines that define it there, too"),
        ("no_such_module", "worker1 has not registered: the module no_such_module registers it, and must be there"),
        ("string", "worker1 has not registered: the module string registers it"),
    ],
)
def test_a_missing_operator_is_an_error_that_names_it_and_the_worker(
    agents: list[Agent], module: str, words: str
) -> None:
    words = f"uses the operator nowhere.f.default, which {words}"
    with current.use_agent(agents[1]), pytest.raises(PipelineError, match=words):
        OperatorName("nowhere.f.default", module).find_operator()


class Splits(nn.Module):
    """A model as torch's own pipelines cut it, by an operator that workers do not have at their start."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.pipelining import pipe_split

        made = torch.tanh(self.first(x))
        pipe_split()
        return self.last(made)  # type: ignore[no-any-return]


@pytest.mark.process
def test_a_worker_imports_the_module_of_an_operator(cluster: Cluster) -> None:
    torch.manual_seed(3)
    net, (x, y) = Splits().double(), small.data(12)
    with torch.no_grad():
        cut = split(traced(copy.deepcopy(net), x), cluster.workers)
    pipe = Pipeline(cut, "1f1b", 4, functional.cross_entropy, small.SGD)
    small.step_alike(pipe, net, functional.cross_entropy(net(x), y), x, y)
