"""The comparison itself: wrong results are never figures, both sides get the same work, who waits stands still."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rpcbench.bench import command
from rpcbench.bench.compare import Plan, Samples
from rpcbench.bench.member import batch
from rpcbench.bench.operation import Api, Operation
from rpcbench.bench.pair import BenchError, pairs
from rpcbench.bench.report import as_table, as_values
from rpcbench.bench.training import TRAINING
from rpcbench.bench.workloads import WORKLOADS
from rpcbench.cli.main import main

SMALL = next(iter(WORKLOADS))


class Held:
    """An RRef acted out."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def local_value(self) -> Any:
        return self.value


def acted(sent: list[Any], spoil: Callable[[Any], Any]) -> Api:
    """The modules acted out in this process: notes what is sent, changes what comes back."""
    far: list[torch.Tensor] = []
    gradients: dict[torch.Tensor, torch.Tensor] = {}

    def rpc_sync(to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        sent.append((function.__name__, args))
        result = function(*args)
        return spoil(result) if isinstance(result, int | torch.Tensor) else result

    def remote(to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Held:
        made = function(*args)
        far.extend(made.parameters())
        return Held(made)

    def backward(context: int, roots: list[torch.Tensor]) -> None:
        found = list(leaves(roots[0].grad_fn))
        gradients.update(zip(found, torch.autograd.grad(roots[0], found), strict=True))

    def near(context: int) -> dict[torch.Tensor, torch.Tensor]:
        return {leaf: grad for leaf, grad in gradients.items() if not any(leaf is other for other in far)}

    def optimizer(kind: Any, rrefs: list[Any], lr: float) -> types.SimpleNamespace:
        @torch.no_grad()
        def step(context: int) -> None:
            for rref in rrefs:
                rref.local_value().sub_(lr * gradients[rref.local_value()])

        return types.SimpleNamespace(step=step)

    rpc = types.SimpleNamespace(rpc_sync=rpc_sync, remote=remote, RRef=Held)
    autograd = types.SimpleNamespace(context=contextlib.nullcontext, backward=backward, get_gradients=near)
    return Api(rpc, autograd, types.SimpleNamespace(DistributedOptimizer=optimizer))


def leaves(node: Any) -> Iterator[torch.Tensor]:
    if hasattr(node, "variable"):
        yield node.variable
    for parent, _ in node.next_functions:
        if parent:
            yield from leaves(parent)


@pytest.mark.parametrize("title", WORKLOADS)
def test_a_right_result_is_told_from_a_wrong_one(title: str) -> None:
    sound = WORKLOADS[title](acted([], lambda result: result), random.Random(1))
    spoilt = WORKLOADS[title](acted([], lambda result: result + 1), random.Random(1))
    with sound.around(), spoilt.around():
        assert sound.right(sound.run())
        assert not spoilt.right(spoilt.run())


@pytest.mark.parametrize("title", [title for title in WORKLOADS if title not in TRAINING])
def test_the_seed_alone_draws_the_work(title: str) -> None:
    def drawn(seed: int) -> str:
        sent: list[Any] = []
        torch.manual_seed(seed)
        WORKLOADS[title](acted(sent, lambda result: result), random.Random(seed)).run()
        return str([(name, [getattr(arg, "shape", arg) for arg in args]) for name, args in sent])

    assert drawn(3) == drawn(3)
    assert len({drawn(seed) for seed in range(8)}) > 1


@pytest.mark.parametrize(("title", "size"), [("echo 64 KB", 64 << 10), ("echo 16 MB", 16 << 20)])
def test_an_echo_has_the_size_it_is_called_by(title: str, size: int) -> None:
    for seed in range(4):
        sent: list[Any] = []
        WORKLOADS[title](acted(sent, lambda result: result), random.Random(seed)).run()
        assert sent[0][1][0].nbytes == size


def test_a_batch_counts_neither_warm_up_nor_wrong_results() -> None:
    runs: list[int] = []
    seconds = batch(Operation(lambda: runs.append(1), lambda _: True), 0.0)
    assert (len(seconds), len(runs)) == (3, 3 + 1 + 3)
    with pytest.raises(AssertionError, match="wrong result"):
        batch(Operation(lambda: 1, lambda result: result == 2), 0.0)


def test_the_ratio_says_how_much_faster_ours_is() -> None:
    ours, theirs = Samples([[1e-3] * 9 + [1.0], [1e-3]]), Samples([[2e-3, 2e-3], [4e-3] * 3 + [9.0]])
    figures = {"work": {"us": ours, "them": theirs}}
    values = as_values(figures, "us", "them", Plan(7))
    assert values["workloads"]["work"]["ratio_p50"] == pytest.approx(4.0)
    assert values["workloads"]["work"]["ratio_p10"] == pytest.approx(2.0)
    assert [b["calls"] for b in values["workloads"]["work"]["them"]["batches"]] == [2, 4]
    assert values["seed"] == 7
    table = as_table(figures, "us", "them", Plan(7))
    assert [list(column.cells) for column in table.columns] == [["work"], ["1 ms (1 ms)"], ["4 ms (2 ms)"], ["4.00x"]]


@pytest.fixture(params=command.MODULES.values())
def api(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_a_pair_waits_stopped_and_works_when_thawed(api: str) -> None:
    with pairs({"side": api}) as [waiting]:
        members = psutil.Process().children()
        assert [member.status() for member in members] == [psutil.STATUS_STOPPED] * 2
        waiting.thaw()
        assert len(waiting.ask(SMALL, "seed", 0.0)) == 3
        waiting.freeze()
        assert [member.status() for member in members] == [psutil.STATUS_STOPPED] * 2


@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_what_fails_on_one_side_is_an_error_with_its_traceback() -> None:
    with pairs({"the side": command.MODULES["torch"]}) as [side]:
        side.thaw()
        with pytest.raises(BenchError, match=r"(?s)the side:.*Traceback.*KeyError: 'no such work'"):
            side.ask("no such work", "seed", 0.0)
        psutil.Process().children()[0].kill()
        with pytest.raises(BenchError, match="the side: the driver process ended"):
            side.ask(SMALL, "seed", 0.0)


@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_a_pair_does_not_outlive_a_killed_comparison() -> None:
    script = f"""
import signal
from rpcbench.bench.operation import Api, Operation
from rpcbench.bench.pair import pairs
with pairs({{"side": {command.MODULES["torch"]!r}}}):
    print("frozen", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        assert comparison.stdout.readline() == "frozen\n"
        assert len(psutil.Process(comparison.pid).children()) == 2
        comparison.kill()


@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_one_run_measures_all_work_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["bench", "--quick", "--rounds", "1", "--seed", "42", "--json", str(file)]) == 0
    values = json.loads(file.read_text())
    assert values["seed"] == 42
    assert set(WORKLOADS) < set(values["workloads"])
    for work in values["workloads"].values():
        assert min(work[side]["p10"] for side in command.MODULES) > 0
    assert "seed 42" in capsys.readouterr().out
