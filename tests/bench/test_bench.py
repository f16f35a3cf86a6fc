"""The comparison itself: wrong results are never measured, both sides get the same work, a waiting side is stopped."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import random
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import addresses
import psutil
import pytest
import torch

from benchmarks import command, member, rows
from benchmarks.__main__ import main
from benchmarks.compare import Plan
from benchmarks.member import batch
from benchmarks.pairs import BenchError, Side, obstacle, pairs, two_hosts
from benchmarks.plain import Peer, send, word
from benchmarks.report import as_markdown, as_plot, as_table, as_values, lines
from benchmarks.rows import BOTH, HOSTS, PLAIN, Api, Batch, Operation, Samples
from benchmarks.workloads import SMALL, WORKLOADS
from rpcbench.base.errors import RpcError


class Held:
    """A stand-in for an RRef."""

    def __init__(self, value: Any, call: Callable[..., Any] = lambda *_: None) -> None:
        self.value = value
        self.call = call

    def local_value(self) -> Any:
        return self.value

    def to_here(self) -> Any:
        return self.call("", lambda: self.value, ())

    def rpc_sync(self) -> Methods:
        return Methods(self)


class Methods:
    """The result of `rpc_sync()` of an RRef: the methods of its value."""

    def __init__(self, rref: Held) -> None:
        self._rref = rref

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._rref.call("", getattr(self._rref.value, name), args)


def acted(sent: list[Any], spoil: Callable[[Any], Any]) -> Api:
    """Return a stand-in for the modules in this process: it records calls, and `spoil` changes their results."""
    far: list[torch.Tensor] = []
    gradients: dict[torch.Tensor, torch.Tensor] = {}

    def rpc_sync(to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        sent.append((function.__name__, args))
        result = function(*args)
        return spoil(result) if isinstance(result, int | torch.Tensor) else result

    def rpc_async(to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> types.SimpleNamespace:
        return types.SimpleNamespace(wait=lambda: rpc_sync(to, function, args))

    def remote(to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Held:
        sent.append((function.__name__, args))
        made = function(*args)
        if isinstance(made, torch.nn.Module):
            far.extend(made.parameters())
        return Held(made, rpc_sync)

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

    rpc = types.SimpleNamespace(rpc_sync=rpc_sync, rpc_async=rpc_async, remote=remote, RRef=Held)
    autograd = types.SimpleNamespace(context=contextlib.nullcontext, backward=backward, get_gradients=near)
    return Api(rpc, autograd, types.SimpleNamespace(DistributedOptimizer=optimizer))


def leaves(node: Any) -> Iterator[torch.Tensor]:
    if hasattr(node, "variable"):
        yield node.variable
    for parent, _ in node.next_functions:
        if parent:
            yield from leaves(parent)


TORCH = rows.OTHERS["torch"].module
ACTED = [title for title, work in WORKLOADS.items() if work.on == BOTH]


def acted_out(title: str, seed: int, spoil: Callable[[Any], Any] = lambda result: result) -> tuple[list[Any], bool]:
    """Run the workload once; return the calls that it sent, and whether it accepted the result."""
    sent: list[Any] = []
    torch.manual_seed(seed)
    operation = WORKLOADS[title].prepare(acted(sent, spoil), random.Random(seed))
    with operation.around():
        return sent, operation.right(operation.run())


@pytest.mark.parametrize("title", ACTED)
def test_a_workload_accepts_a_right_result_and_rejects_a_wrong_one(title: str) -> None:
    assert acted_out(title, 1)[1]
    assert not acted_out(title, 1, lambda result: result if result is None else result + 1)[1]


@pytest.mark.parametrize("title", [title for title in ACTED if "d=" not in title and "step" not in title])
def test_the_work_depends_only_on_the_seed(title: str) -> None:
    def drawn(seed: int) -> str:
        sent = acted_out(title, seed)[0]
        return str([(name, [getattr(arg, "shape", arg) for arg in args]) for name, args in sent])

    assert drawn(3) == drawn(3)
    assert len({drawn(seed) for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("title", "size"),
    [("echo 1 KB", 1 << 10), ("echo 64 KB", 64 << 10), ("echo 1 MB", 1 << 20), ("send 16 MB, int back", 16 << 20)],
)
def test_a_payload_has_the_size_in_its_title(title: str, size: int) -> None:
    for seed in range(8):
        assert acted_out(title, seed)[0][0][1][0].nbytes == size


@pytest.mark.parametrize("many", [1, 16, 256])
def test_the_number_of_calls_in_flight_is_that_in_the_title(many: int) -> None:
    sent: list[Any] = []
    operation = WORKLOADS[f"{many} in flight, per call"].prepare(acted(sent, lambda result: result), random.Random(1))
    operation.run()
    assert len(sent) == operation.calls == many


def test_a_batch_excludes_its_warm_up_and_fails_for_a_wrong_result() -> None:
    runs: list[int] = []
    timed = batch(Operation(lambda: runs.append(1), lambda _: True), 0.0)
    assert (len(timed.seconds), len(runs)) == (3, 3 + 1 + 3)
    with pytest.raises(AssertionError, match="wrong result"):
        batch(Operation(lambda: 1, lambda result: result == 2), 0.0)


def test_the_time_of_an_operation_is_divided_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = iter([5.0, 11.0]), itertools.count(0.0, 0.02)  # each look at the time takes 0.02 s
    monkeypatch.setattr(member, "perf_counter", lambda: next(now))
    seconds, cpu = batch(Operation(lambda: None, lambda _: True, calls=4), 0.0, lambda: next(clock))
    assert cpu == pytest.approx(6.0 / 3 / 4)
    assert seconds == pytest.approx([0.005] * 3)


def test_the_ratio_is_the_time_of_the_other_side_divided_by_ours() -> None:
    ours = Samples(0.5, [Batch([1e-3] * 9 + [1.0], 1e-4), Batch([1e-3], 1e-4)])
    theirs = Samples(0.5, [Batch([2e-3, 2e-3], 3e-4), Batch([4e-3] * 3 + [9.0], 5e-4)])
    figures = {SMALL: {"us": ours, "them": theirs}}
    work = as_values(figures, "us", "them", Plan(7))["workloads"][SMALL]
    assert work["ratio"] == pytest.approx(4.0)
    assert work["ratio_p10"] == pytest.approx(2.0)
    assert [b["calls"] for b in work["them"]["batches"]] == [2, 4]
    table = as_table(figures, "us", "them", Plan(7))
    cells = [list(column.cells) for column in table.columns]
    assert cells == [[SMALL], ["1 ms (1 ms)"], ["4 ms (2 ms)"], ["4.00x"], ["4.00x"], ["✓ 2x"]]


def test_a_row_can_be_a_percentile_and_be_measured_on_one_side() -> None:
    slow = "beside a busy thread, 99th percentile"
    panel = "with a panel open"
    figures = {
        SMALL: {"us": Samples(0.5, [Batch([1e-3])]), "them": Samples(0.5, [Batch([1e-3])])},
        slow: {"us": Samples(0.99, [Batch([1e-6 * n for n in range(1, 101)])])},
        panel: {"us": Samples(0.5, [Batch([1.5e-3])])},
    }
    goals = {row.title: (row.ours, row.theirs, row.ratio, row.goal) for row in lines(figures, "us", "them", Plan(1))}
    assert goals[SMALL][2:] == ("1.00x", "✗ 2x")
    assert goals[slow] == ("99 µs (10.9 µs)", "", "", "✓ at most 1 ms")
    assert goals[panel] == ("1.5 ms (1.5 ms)", "", "", f"✗ at most 1.2x of “{SMALL}”: 1.50x")


def test_rows_of_memory_and_cpu_have_their_own_units() -> None:
    plan = Plan(1)
    memory, idle = "memory that a worker adds", "4 workers that rest"
    figures = {
        memory: {"us": Samples(0.5, [Batch([41e6])]), "them": Samples(0.5, [Batch([82e6])])},
        idle: {"us": Samples(0.5, [Batch([0.002])])},
    }
    cells = {line.title: (line.ours, line.ratio, line.goal) for line in lines(figures, "us", "them", plan)}
    assert cells[memory] == ("41 MB (41 MB)", "2.00x", "✗ at most 40 MB")
    assert cells[idle] == ("0.20% of a core (0.20% of a core)", "", "✓ at most 1.00% of a core")


def test_the_table_is_written_into_a_page_and_its_ratios_into_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {SMALL: {"rpcbench": Samples(0.5, [Batch([1e-3])]), "torch": Samples(0.5, [Batch([5e-3])])}}
    monkeypatch.setattr(command, "compare", lambda *_: figures)
    page, plot = tmp_path / "RESULTS.md", tmp_path / "plot.svg"
    arguments = ["--seed", "1", "--svg", str(plot), "--markdown", str(page)]
    page.write_text("before\n")
    assert main(arguments) == 1, "the page has no place for the table"
    page.write_text("before\n<!-- bench -->\nold<!-- end of bench -->\nafter\n")
    for _ in range(2):
        assert main(arguments) == 0
        table = as_markdown(figures, "rpcbench", "torch", Plan(1))
        assert page.read_text() == f"before\n<!-- bench -->\n{table}<!-- end of bench -->\nafter\n"
    assert f"| {SMALL} | 1 ms (1 ms) | 5 ms (5 ms) | 5.00x |  |" in table
    drawn = ElementTree.fromstring(plot.read_text())
    assert {SMALL, "5.00x"} < {element.text for element in drawn.iter()}
    assert plot.read_text() == as_plot(figures, "rpcbench", "torch", Plan(1))


def test_runs_under_several_interpreters_are_columns_of_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, ours in (("slow", 1e-3), ("quick", 5e-4)):
        figures = {SMALL: {"rpcbench": Samples(0.5, [Batch([ours])]), "torch": Samples(0.5, [Batch([2e-3])])}}
        values = as_values(figures, "rpcbench", "torch", Plan(1))
        values["versions"]["interpreter"] = name
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(values))
    page = tmp_path / "RESULTS.md"
    page.write_text("<!-- interpreters -->\n<!-- end of interpreters -->\n")
    assert main(["--columns", *map(str, files), "--markdown", str(page)]) == 0
    table = f"|  | slow | quick |\n| --- | --- | --- |\n| {SMALL} | 1 ms, 2.00x | 500 µs, 4.00x |\n"
    assert capsys.readouterr().out == table and f"<!-- interpreters -->\n{table}<!-- end" in page.read_text()


def test_rows_are_chosen_by_a_part_of_their_title() -> None:
    plan = Plan(1)
    assert command.chosen(plan, ["echo 1 KB", "in flight"])[-1] == "echo 1 KB"
    assert len(command.chosen(plan, ["in flight"])) == 3
    assert command.chosen(plan, []) == list(plan.rows())
    with pytest.raises(RpcError, match=r"(?s)'echo 3 KB'.*echo 1 KB"):
        command.chosen(plan, ["echo 3 KB"])


@pytest.fixture(params=[command.OUR_MODULE, TORCH])
def api(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.long
@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_a_waiting_pair_is_stopped_and_works_when_it_is_thawed(api: str) -> None:
    before = psutil.Process().children()
    with pairs([Side("side", api)]) as [waiting]:
        members = [child for child in psutil.Process().children() if child not in before]
        assert [member.status() for member in members] == [psutil.STATUS_STOPPED] * 2
        waiting.thaw()
        assert len(waiting.ask(SMALL, "seed", 0.0).values) == 3
        waiting.freeze()
        assert [member.status() for member in members] == [psutil.STATUS_STOPPED] * 2


@pytest.mark.long
@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_a_failure_on_one_side_is_raised_with_its_traceback() -> None:
    before = psutil.Process().children()
    with pairs([Side("the side", TORCH)]) as [side]:
        side.thaw()
        with pytest.raises(BenchError, match=r"(?s)the side:.*Traceback.*KeyError: 'no such work'"):
            side.ask("no such work", "seed", 0.0)
        driver, *_ = [child for child in psutil.Process().children() if child not in before]
        driver.kill()
        with pytest.raises(BenchError, match="the side: the driver process ended"):
            side.ask(SMALL, "seed", 0.0)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_a_pair_does_not_outlive_a_killed_comparison() -> None:
    script = f"""
import signal
from benchmarks.pairs import Side, pairs
with pairs([Side("side", {TORCH!r})]):
    print("frozen", flush=True)
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        assert comparison.stdout.readline() == "frozen\n"
        assert len(psutil.Process(comparison.pid).children()) == 2
        comparison.kill()


@pytest.fixture
def port() -> Iterator[int]:
    with addresses.port() as kept:
        yield kept


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("near", [False, True])
def test_a_plain_loop_sends_all_payloads_and_reports_the_cpu_time(near: bool, port: int, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bare" if near else f"tcp://127.0.0.1:{port}"
    served: list[bool] = []

    def serve() -> None:
        Peer(1, url).shutdown()
        served.append(True)

    receiver = threading.Thread(target=serve)
    receiver.start()
    peer = Peer(0, url)
    assert [peer.send(bytes([value]) * size) for value, size in ((7, 1), (9, 1 << 20), (3, 5))] == [7, 9, 3]
    operation = send(1 << 16)(Api(peer, None, None), random.Random(1))
    assert operation.right(operation.run())
    assert not operation.right(operation.run() + 1)
    there_and_back = word(Api(peer, None, None), random.Random(1))
    assert there_and_back.right(there_and_back.run())
    assert peer.rpc_sync("", time.process_time) > 0
    peer.shutdown()
    receiver.join(10)
    assert served


@pytest.mark.usefixtures("no_leaks")
def test_two_hosts_are_connected_and_are_removed_afterwards() -> None:
    if problem := obstacle():
        pytest.skip(problem)
    with two_hosts() as (one, other):
        ask = [*one.command(), "ip", "-o", "route", "get", other.address]
        assert "dev e0" in subprocess.run(ask, check=True, capture_output=True, text=True).stdout
        names = {one.name, other.name}
        assert names <= {path.name for path in Path("/run/netns").iterdir()}
    assert names.isdisjoint(path.name for path in Path("/run/netns").iterdir())


def test_a_runtime_that_is_not_installed_is_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--against", "monarch"]) == 1
    assert "monarch is not installed here: pip install torchmonarch" in capsys.readouterr().err


def test_another_runtime_runs_only_supported_rows_and_has_no_goals() -> None:
    ray, monarch = (rows.OTHERS[name].module for name in ("ray", "monarch"))
    can = {title: [rows.does(api, work.needs) for api in (ray, monarch, TORCH)] for title, work in WORKLOADS.items()}
    assert can[SMALL] == [True, True, True]
    assert can["method through an RRef"] == [True, False, True]
    assert can["context + backward, d=16"] == [False, False, True]
    figures = {SMALL: {"rpcbench": Samples(0.5, [Batch([1e-3])]), "ray": Samples(0.5, [Batch([5e-3])])}}
    (line,) = lines(figures, "rpcbench", "ray", Plan(1))
    assert (line.ratio, line.goal) == ("5.00x", "")


@pytest.mark.process
@pytest.mark.parametrize("name", ["ray", "monarch"])
def test_another_runtime_runs_all_rows_that_it_supports(name: str, tmp_path: Path) -> None:
    """This runs only where the runtime is installed; no environment of this project includes it."""
    pytest.importorskip(rows.OTHERS[name].imports)
    file = tmp_path / "figures.json"
    assert main(["--against", name, "--quick", "--seed", "1", "--json", str(file)]) == 0
    values = json.loads(file.read_text())["workloads"]
    module = rows.OTHERS[name].module
    able = {title for title, work in WORKLOADS.items() if work.on == BOTH and rows.does(module, work.needs)}
    assert {title for title, work in values.items() if name in work} == able


@pytest.mark.long
@pytest.mark.process
@pytest.mark.usefixtures("no_leaks")
def test_one_run_measures_rows_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m benchmarks --quick` runs all rows."""
    file = tmp_path / "figures.json"
    texts = [SMALL, "busy thread", "panel", "plain loop", "bare", "in one process, d=16", "first call"]
    only = [argument for text in texts for argument in ("--only", text)]
    assert main(["--quick", "--rounds", "1", "--seed", "42", "--json", str(file), *only]) == 0
    values = json.loads(file.read_text())
    assert values["seed"] == 42
    beyond = {title for title, work in WORKLOADS.items() if work.on in (HOSTS, PLAIN) and obstacle()}
    assert set(values["workloads"]) == set(command.chosen(Plan.quick(42), texts)) - beyond
    for title, work in values["workloads"].items():
        both = title not in WORKLOADS or WORKLOADS[title].on == BOTH
        assert ("torch" in work) == both and command.OURS in work
        assert all(side["p10"] > 0 for side in work.values() if isinstance(side, dict))
    printed = capsys.readouterr()
    assert "seed 42" in printed.out
    assert ("Not measured between hosts" in printed.err) == bool(obstacle())
