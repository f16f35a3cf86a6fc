"""The behaviour that programs for torch's RPC rely on, case by case, in real processes.

Each test names its case. Cases with tests elsewhere:

     9, 10  counts under delayed, repeated and lost messages      tests/protocol/test_simulation.py, test_rrefs.py
    13      losses: owner, user                                  tests/faults: rows 1, 23, 24; a middle one: below
    14      control messages while all threads are blocked       tests/runtime/test_cancel.py
    15      asynchronous functions                               tests/rpc/test_rpc.py: asynchronous
    29      joining, leaving, joining again                tests/runtime/test_meeting_and_parting.py, faults: row 29
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from worlds import until

import rpcbench
import rpcbench.rpc as rpc
from rpcbench.base.errors import RemoteError, RpcError, RpcTimeoutError, WorkerLostError

pytestmark = pytest.mark.process
OVER = "RPC has not been initialized"


@pytest.fixture(scope="module")
def world() -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(2) as made:
        yield made


def nobody_uses_anything(world: rpcbench.Cluster) -> bool:
    return not any([_owned(), *(world.rpc_sync(name, _owned) for name in world.workers)])


def _owned() -> dict[str, Any]:
    gc.collect()  # errors that earlier tests have caught
    return rpc._get_current_rpc_agent().tables()["owned"]


# -- before, in and after a world
USES: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("a", max, (1, 2)),
    "rpc_async": lambda: rpc.rpc_async("a", max, (1, 2)),
    "remote": lambda: rpc.remote("a", max, (1, 2)),
    "RRef": lambda: rpc.RRef(1),
    "shutdown": rpc.shutdown,
    "get_worker_info": rpc.get_worker_info,
    "get_rpc_timeout": rpc.get_rpc_timeout,
    "wait_for": lambda: rpc.wait_for(1),
    "explain": rpcbench.explain,
}


@pytest.fixture
def alone(no_leaks: None) -> Iterator[Callable[[], None]]:
    options = rpc.TensorPipeRpcBackendOptions(init_method="file:///nowhere/cases")
    yield lambda: rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


@pytest.mark.parametrize("use", USES)
def test_case_01_each_function_fails_before_init_rpc_and_after_shutdown(alone: Callable[[], None], use: str) -> None:
    with pytest.raises(RuntimeError, match=OVER):
        USES[use]()
    alone()
    rpc.shutdown()
    with pytest.raises(RuntimeError, match=OVER):
        USES[use]()


def test_case_02_a_process_joins_one_world_at_a_time_and_another_after_it(alone: Callable[[], None]) -> None:
    alone()
    with pytest.raises(RuntimeError, match="already initialized"):
        alone()
    assert rpc.rpc_sync("me", max, (1, 2)) == 2
    rpc.shutdown()
    alone()
    assert rpc.rpc_sync("me", max, (1, 2)) == 2


@pytest.mark.parametrize("name", ["", "with space", "n" * 128])
def test_case_03_an_invalid_worker_name_is_refused(no_leaks: None, name: str) -> None:
    with pytest.raises(RuntimeError, match="Worker name must"):
        rpc.init_rpc(name, rank=0, world_size=1)


# -- calls
class Adder:
    def __init__(self, base: int) -> None:
        self.base = base

    def add(self, number: int) -> int:
        return self.base + number

    __call__ = add


def function(number: int) -> int:
    return number + 10


_cell: dict[str, Any] = {"__name__": "__main__"}
exec("def in_a_cell(number): return number + 10", _cell)
_base = 10
FUNCTIONS: dict[str, Callable[[int], int]] = {
    "builtin": functools.partial(operator.add, 10),
    "function": function,
    "lambda": lambda number: number + 10,
    "closure": (lambda base: lambda number: number + base)(10),
    "bound method": Adder(10).add,
    "callable object": Adder(10),
    "function of a notebook": _cell["in_a_cell"],
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("to", ["worker1", "notebook"])
def test_case_04_a_remote_function_returns_the_same_value_as_a_local_one(
    world: rpcbench.Cluster, kind: str, to: str
) -> None:
    call = FUNCTIONS[kind]
    found = [rpc.rpc_sync(to, call, (1,)), rpc.rpc_async(to, call, (1,)).wait(), rpc.remote(to, call, (1,)).to_here()]
    assert found == [call(1)] * 3 == [11] * 3


def test_case_04_a_remote_operator_of_torch_returns_the_same_value_as_a_local_one(world: rpcbench.Cluster) -> None:
    args = (torch.ones(2), 1)
    for found in (rpc.rpc_sync("worker1", torch.add, args), rpc.remote("worker1", torch.add, args).to_here()):
        assert torch.equal(found, torch.add(*args))


def test_case_05_a_worker_can_be_given_by_name_id_or_info(world: rpcbench.Cluster) -> None:
    info = rpc.get_worker_info("worker1")
    assert {rpc.rpc_sync(to, os.getpid) for to in ("worker1", 1, info)} == {world.pid("worker1")}
    assert rpc.rpc_sync("notebook", os.getpid) == os.getpid()
    with pytest.raises(RuntimeError, match=r"could not find destination name worker7: did you mean worker2\?"):
        rpc.rpc_sync("worker7", os.getpid)
    with pytest.raises(ValueError, match=r"3\.2"):
        rpc.rpc_sync(3.2, os.getpid)  # type: ignore[arg-type]


def test_case_06_a_timeout_error_names_worker_and_time_and_timeout_0_means_none(world: rpcbench.Cluster) -> None:
    with pytest.raises(RpcTimeoutError, match=r"RPC ran for more than set timeout \(300 ms\).*sleep on worker1"):
        rpc.rpc_sync("worker1", time.sleep, (3,), timeout=0.3)
    assert rpc.get_rpc_timeout() == 60
    rpc._set_rpc_timeout(0.3)
    try:
        with pytest.raises(RpcTimeoutError, match="300 ms"):
            rpc.rpc_sync("worker1", time.sleep, (3,))
        assert rpc.rpc_sync("worker1", time.sleep, (0.6,), timeout=0) is None
    finally:
        rpc._set_rpc_timeout(60)


def test_case_07_an_rref_whose_creation_timed_out_raises_in_each_use(world: rpcbench.Cluster) -> None:
    rref = rpc.remote("worker1", time.sleep, (3,), timeout=0.2)
    creation = rref._creation
    assert creation is not None
    until(creation.done)
    with pytest.raises(RuntimeError, match=r"RRef creation via rpc\.remote\(\) timed out"):
        rref.to_here()
    with pytest.raises(RuntimeError, match="timed out"):
        rpc.rpc_sync("worker2", fetch, (rref,))


def fetch(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def fail(error: Callable[..., BaseException], *args: Any) -> None:
    raise error(*args)


def test_case_08_errors_keep_their_type_and_text(world: rpcbench.Cluster) -> None:
    for use in (lambda: rpc.rpc_sync("worker1", fail, (ValueError, r"not \x41")),
                rpc.remote("worker1", fail, (ValueError, r"not \x41")).to_here):  # fmt: skip
        with pytest.raises(ValueError, match=r"^not \\x41$") as caught:
            use()
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteError) and "in fail" in cause.traceback
    with pytest.raises(KeyError, match="'key'"):
        rpc.rpc_sync("worker1", fail, (KeyError, "key"))
    with pytest.raises(TwoArguments, match="seven"):
        rpc.rpc_sync("worker1", fail, (TwoArguments, 7, "seven"))
    for error in (SystemExit, KeyboardInterrupt):
        with pytest.raises(RpcError, match=error.__name__):
            rpc.rpc_sync("worker1", fail, (error,))
    assert rpc.rpc_sync("worker1", max, (1, 2)) == 2


# -- RRefs
def forward(rref: rpc.RRef[Any], to: str) -> Any:
    return rpc.rpc_sync(to, fetch, (rref,))


def give_back(value: Any) -> Any:
    return value


def test_case_09_a_shared_rref_works_everywhere_and_is_freed_after_its_last_fork(world: rpcbench.Cluster) -> None:
    made, own = rpc.remote("worker1", list, ((1,),)), rpc.RRef([2])
    assert rpc.rpc_sync("worker1", fetch, (made,)) == [1], "to its owner"
    assert rpc.rpc_sync("worker2", fetch, (own,)) == [2], "from its owner"
    assert rpc.rpc_sync("worker2", fetch, (made,)) == [1], "from user to user"
    assert rpc.rpc_sync("worker2", forward, (made, "worker1")) == [1], "back to its owner"
    del made, own
    until(lambda: nobody_uses_anything(world))


def slowly(seconds: float) -> str:
    time.sleep(seconds)
    return "made"


def test_case_11_to_here_waits_until_the_value_exists(world: rpcbench.Cluster) -> None:
    rref = rpc.remote("worker1", slowly, (0.3,))
    assert rref.to_here() == rpc.rpc_sync("worker2", fetch, (rref,)) == "made"


def test_case_12_rrefs_can_be_sent_anywhere_in_a_value(world: rpcbench.Cluster) -> None:
    rref = rpc.remote("worker1", list, ((1,),))
    assert rpc.rpc_sync("worker2", lambda given: given["in"][0].to_here(), ({"in": (rref,)},)) == [1]
    assert rpc.rpc_sync("worker2", functools.partial(fetch, rref)) == [1], "in a function with arguments"
    assert rpc.rpc_sync("worker2", capturing(rref)) == [1], "in a closure"
    assert rpc.rpc_sync("worker2", give_back, (rref,)).to_here() == [1], "in a result"
    nested = rpc.remote("worker2", give_back, (rref,))
    assert nested.to_here().to_here() == [1], "an RRef of an RRef"
    del rref, nested
    until(lambda: nobody_uses_anything(world))


def capturing(rref: rpc.RRef[Any]) -> Callable[[], Any]:
    return lambda: rref.to_here()


_held: list[Any] = []


def pass_on_and_hold(rref: rpc.RRef[Any], to: str) -> None:
    _held.append(rref)
    rpc.rpc_sync(to, hold, (rref,))


def hold(rref: rpc.RRef[Any]) -> None:
    _held.append(rref)


def use_held() -> Any:
    return _held[-1].to_here()


def drop_held() -> None:
    _held.clear()


def test_case_13_a_fork_outlives_the_member_that_passed_it_on(world: rpcbench.Cluster) -> None:
    own = rpc.RRef([1])
    rpc.rpc_sync("worker1", pass_on_and_hold, (own, "worker2"))
    os.kill(world.pid("worker1"), signal.SIGKILL)
    until(lambda: world.workers == ["worker2"])
    assert rpc.rpc_sync("worker2", use_held) == [1], "the member that got it from there still has it"
    with pytest.raises(WorkerLostError, match="worker1"):
        rpc.rpc_sync("worker1", max, (1, 2))
    rpc.rpc_sync("worker2", drop_held)
    until(lambda: nobody_uses_anything(world), "the forks of both to be gone")
    world.scale(2)


# -- threads
def nest(levels: int) -> int:
    return 0 if levels == 0 else 1 + rpc.rpc_sync(rpc.get_worker_info(), nest, (levels - 1,))


def test_case_14_calls_of_a_worker_to_itself_can_nest_deeper_than_its_pool(world: rpcbench.Cluster) -> None:
    assert rpc.rpc_sync("worker1", nest, (100,)) == 100
    assert rpc.rpc_sync("notebook", nest, (100,)) == 100


def call_back(number: int) -> int:
    return rpc.rpc_sync("notebook", max, (number, -1))


def test_case_14_many_calls_can_call_back_at_once(world: rpcbench.Cluster) -> None:
    calls = [rpc.rpc_async(f"worker{1 + number % 2}", call_back, (number,)) for number in range(64)]
    assert rpcbench.wait_all(calls) == list(range(64))
