"""Calls by name, of torch's operators, and by proxies of RRefs; other picklers; waits for several calls at once."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from worlds import nothing_left, until, world

import rpcbench.rpc as rpc
from rpcbench.base.errors import NoOverloadError, RpcError, RpcTimeoutError, WorkerLostError
from rpcbench.rpc import RRef, api, functions, remote, rpc_async, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.torch_shim.compat.internal import _internal_rpc_pickler, deserialize, serialize


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


# -- by name
@pytest.fixture
def in_main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A `__main__` with functions, which all workers here share."""
    main = ModuleType("__main__")
    main.double = lambda x: 2 * x  # type: ignore[attr-defined]
    main.later = rpc.functions.async_execution(lambda x: rpc_async("worker2", abs, (x,)))  # type: ignore[attr-defined]
    main.Counter = Counter  # type: ignore[attr-defined]
    main.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


class Counter:
    """A value to hold on a worker."""

    def __init__(self, begin: int = 0) -> None:
        self.number = begin

    @staticmethod
    def zero() -> int:
        return 0

    def __call__(self, step: int = 1) -> int:
        self.number += step
        return self.number

    def up(self) -> int:
        return self(1)

    @rpc.functions.async_execution
    def up_later(self) -> torch.futures.Future[int]:
        return rpc_async("worker2", abs, (self(1),))


def test_a_name_calls_a_function_of_the_callees_main(agents: list[Agent], in_main: ModuleType) -> None:
    assert rpc_sync("worker1", "double", (4,)) == 8
    assert rpc_async("worker1", "double", kwargs={"x": 5}).wait() == 10
    assert remote("worker1", "Counter.zero").to_here() == 0
    assert rpc_sync("worker1", "later", (-3,)) == 3


def test_a_name_with_a_module_is_imported_by_the_callee(agents: list[Agent]) -> None:
    assert rpc_sync("worker1", "os.path:basename", ("/a/b",)) == "b"
    assert rpc_sync("worker1", "collections:OrderedDict.fromkeys", ("ab",)) == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nothing", AttributeError, "worker1 has no function 'nothing' in its main namespace"),
        ("os:nothing", AttributeError, "worker1 has no function 'nothing' in module os"),
        ("no_such_module:f", AttributeError, "worker1 has no function 'f' in module no_such_module"),
        ("number", TypeError, "'number' on worker1 is not a function: its type is int"),
    ],
)
def test_a_name_that_leads_to_no_function_raises_an_error_with_that_name(
    agents: list[Agent], in_main: ModuleType, name: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        rpc_sync("worker1", name)
    with pytest.raises(error, match=words):
        remote("worker1", name).to_here()


class Full(Exception):
    """An error of a user."""


def refuse(*_: Any) -> None:
    raise Full(7)


@rpc.functions.async_execution
def refuse_later(passes: bool) -> torch.futures.Future[Any]:
    if passes:
        return rpc_async("worker2", refuse).then(lambda done: done.wait())
    return rpc_async("worker2", abs, (1,)).then(refuse)


@pytest.mark.parametrize("passes", [True, False])
def test_an_error_keeps_its_type_through_continuations_and_async_execution(agents: list[Agent], passes: bool) -> None:
    chained = rpc_async("worker1", refuse_later, (passes,)).then(lambda done: done.wait())
    for wait in (chained.wait, remote("worker1", refuse_later, (passes,)).to_here):
        with pytest.raises(Full) as caught:
            wait()
        assert caught.value.args == (7,)


def test_a_timeout_names_the_called_function(agents: list[Agent], in_main: ModuleType) -> None:
    gate = threading.Event()
    in_main.wait_here = gate.wait  # type: ignore[attr-defined]
    with pytest.raises(RpcTimeoutError, match="wait_here on worker1"):
        rpc_sync("worker1", "wait_here", (20,), timeout=0.1)
    gate.set()


@pytest.mark.parametrize("call", [rpc_sync, rpc_async, remote])
@pytest.mark.parametrize("args", [0, 7, "ab", b"", {}, {1: 2}, torch.zeros(1), torch.ones(2), range(2)])
def test_args_that_are_no_tuple_raise_an_error_about_the_forgotten_comma(
    agents: list[Agent], call: Any, args: Any
) -> None:
    for function in (abs, torch.neg):
        with pytest.raises(TypeError, match=r"args is a tuple or list of arguments, not an? .*; .* write args=\(x,\)"):
            call("worker1", function, args)
    with pytest.raises(TypeError, match="kwargs is a dict of named arguments, not a list"):
        call("worker1", abs, (1,), [args])


# -- operators of torch
@pytest.mark.parametrize("call", [rpc_sync, rpc_async, remote])
@pytest.mark.parametrize(("function", "args"), [(torch.add, ()), (torch.add, ("a", 1)), (torch.matmul, (1, 2))])
def test_a_call_of_an_operator_that_matches_no_overload_is_not_sent(
    agents: list[Agent], call: Any, function: Any, args: tuple[Any, ...]
) -> None:
    served: list[Any] = []
    agents[1].hooks.on_error.append(served.append)
    text = f"(?s)Overloaded torch operator .* failed to match any schema.*{function.__name__}"
    with pytest.raises(NoOverloadError, match=text):
        call("worker1", function, args)
    assert rpc_sync("worker1", abs, (-1,)) == 1 and served == []


def test_calls_of_operators_that_python_accepts_are_sent(agents: list[Agent]) -> None:
    ones = rpc_sync("worker1", torch.ones, (2, 3), {"requires_grad": True})
    assert ones.shape == (2, 3) and ones.requires_grad
    assert torch.equal(rpc_sync("worker1", torch.add, (torch.ones(2), 2), {"alpha": 3}), torch.full((2,), 7.0))
    with pytest.raises(RuntimeError, match="size of tensor"):  # only the callee can know
        rpc_sync("worker1", torch.add, (torch.ones(2), torch.ones(3)))
    assert rpc_sync("worker1", min, (2, 1)) == 1
    assert rpc_sync("worker1", torch.nn.functional.gelu, (torch.zeros(2),)).tolist() == [0, 0]


def test_the_check_of_overloads_does_not_run_the_operator() -> None:
    counted = torch.zeros(1)
    functions.check_overload(torch.relu_, (counted,), {})
    before = torch.get_num_threads()
    functions.check_overload(torch.set_num_threads, (before + 1,), {})
    assert torch.get_num_threads() == before


# -- proxies
def test_a_proxy_calls_the_value_and_reads_its_attributes(agents: list[Agent]) -> None:
    counter = remote("worker1", Counter, (5,))
    assert counter.rpc_sync()() == 6
    assert counter.rpc_async()(step=4).wait() == 10
    assert counter.remote()(0).to_here() == 10
    assert counter.rpc_sync().attr("number") == counter.rpc_async().attr("number").wait() == 10
    assert counter.remote().attr("number").to_here() == 10
    assert counter.rpc_sync().up_later() == counter.rpc_sync().attr("number") == 11
    assert counter.remote().up_later().to_here() == 12
    for wrong in (lambda: counter.rpc_sync().attr("no"), lambda: counter.remote().attr("no")):
        with pytest.raises(AttributeError, match="no attribute 'no'"):
            wrong()
    number = remote("worker1", int, (3,))
    for wrong in (lambda: number.rpc_sync()(), lambda: number.remote()()):
        with pytest.raises(TypeError, match="'int' object is not callable"):
            wrong()


def test_an_operation_on_an_rref_raises_an_error_that_shows_the_way_to_the_value(agents: list[Agent]) -> None:
    rref = remote("worker1", torch.ones, (2,))
    for wrong in (lambda: rref + 1, lambda: 2 * rref, lambda: -rref, lambda: torch.ones(2) @ rref):
        with pytest.raises(TypeError, match=r"use rref\.to_here\(\)"):
            wrong()
    with pytest.raises(AttributeError, match=r"no attribute 'sum'; of the value: rref\.rpc_sync\(\)\.sum"):
        rref.sum()  # type: ignore[attr-defined]
    assert not hasattr(rref, "__len__") and not callable(rref)


def test_a_call_in_a_forked_child_raises_that_the_process_is_a_fork(agents: list[Agent]) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rpc_sync("worker1", int)
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert told.read().startswith("RPC has not been initialized in this process: it is a fork of")


def test_a_proxy_raises_attribute_error_for_a_missing_method(agents: list[Agent]) -> None:
    counter = remote("worker1", Counter)
    text = "'Counter' object has no attribute 'down'"
    with pytest.raises(AttributeError, match=text):
        counter.rpc_sync().down()
    with pytest.raises(AttributeError, match=text):
        counter.rpc_async().down().wait()
    with pytest.raises(AttributeError, match=text):
        counter.remote().down()


def test_a_method_takes_one_call_and_one_result(agents: list[Agent]) -> None:
    """There is no fork, and no message about one."""
    counter = remote("worker1", Counter)
    counter.to_here()
    _until_quiet(agents)
    told: list[tuple[str, str]] = []
    agents[0].machine.read_node(
        lambda node: node.set_observers(None, lambda how, to, seq, m: told.append((how, type(m).__name__)))
    )
    assert counter.rpc_sync()(2) == 2
    _until_quiet(agents)
    assert [words for words in told if words[1] != "Seen"] == [("sent", "Call"), ("received", "Result")]


def _until_quiet(agents: list[Agent]) -> None:
    until(
        lambda: not any(agent.machine.read_node(lambda node: node.delivery.describe_unfinished()) for agent in agents),
        "all acknowledged",
    )


class Noted:
    """A value with a method that runs after all references to it are gone."""

    noted = threading.Event()
    gate = threading.Event()

    def note(self) -> None:
        self.noted.set()

    @classmethod
    def hold(cls) -> bool:
        return cls.gate.wait(10)


@pytest.mark.parametrize("says_so", [False, True])
def test_a_queued_method_keeps_its_value(agents: list[Agent], says_so: bool) -> None:
    """Its caller has dropped all references: another value, dropped at the same time, is freed meanwhile."""
    Noted.noted.clear(), Noted.gate.clear()
    noted, other, pool = remote("worker1", Noted), remote("worker1", Counter), agents[1].calls.pool
    noted.to_here(), other.to_here()
    busy = [rpc_async("worker1", Noted.hold) for _ in range(pool.limit)]
    until(lambda: pool.busy == pool.limit, "no room")
    noting = noted.rpc_async().note()
    until(lambda: len(pool._queue) == 1, "a method that has not begun")
    gone, kept = other._rref, noted._rref
    if says_so:
        noted.release(), other.release()
    else:
        del noted, other, noting
    gc.collect()
    until(lambda: not agents[1].machine.read_node(lambda node: gone in node.rrefs.owned), "the other's value has gone")
    Noted.gate.set()
    assert all(future.wait() for future in busy)
    assert Noted.noted.wait(10)
    until(lambda: not agents[1].machine.read_node(lambda node: kept in node.rrefs.owned), "so has this one's")


def test_a_method_of_a_lost_value_raises_worker_lost_error(agents: list[Agent]) -> None:
    counter = remote("worker1", Counter)
    counter.to_here()
    fork = counter._fork
    assert fork is not None
    agents[0].machine.read_node(lambda node: node.rrefs.users.pop(fork))  # as after the loss of its owner
    with pytest.raises(WorkerLostError, match="create the value again"):
        counter.rpc_sync().up()


def test_only_remote_asks_for_the_type_and_only_once(agents: list[Agent]) -> None:
    counter = remote("worker1", Counter)
    counter.to_here()
    calls: list[str] = []

    def counting(begin: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["label"])
        return begin(*args, **kwargs)

    for name in ("call", "ask"):
        setattr(agents[0], name, functools.partial(counting, getattr(agents[0], name)))
    counter.rpc_sync().up()
    assert len(calls) == 1
    results = [counter.remote().up() for _ in range(3)]
    assert len(calls) == 2 and {result.to_here() for result in results} == {2, 3, 4}


def test_an_rref_gives_its_type_and_the_outcome_of_its_creation(agents: list[Agent]) -> None:
    counter, own = remote("worker1", Counter), RRef(Counter())
    assert counter._get_type() is Counter is own._get_type(blocking=False).wait()
    assert counter._get_future().wait() is own._get_future().wait() is None
    failed = remote("worker1", int, ("x",))
    for ask in (failed._get_type, failed._get_future().wait, failed.remote().bit_length):
        with pytest.raises(ValueError, match="invalid literal"):
            ask()


# -- release
def test_a_released_rref_frees_its_value_and_refuses_later_uses(agents: list[Agent]) -> None:
    counter, own = remote("worker1", Counter), RRef(Counter())
    counter.rpc_sync().up()
    rpc_sync("worker1", Counter.zero)
    for rref in (counter, own):
        rref.release()
        rref.release()
        for use in (rref.to_here, rref.local_value, lambda rref=rref: rpc_sync("worker2", id, (rref,))):
            with pytest.raises(RpcError, match="after deletion"):
                use()
    with pytest.raises(RpcError, match="Cannot call fork an UserRRef after deletion"):
        serialize(counter)
    nothing_left(agents)
    assert "UserRRef" in repr(counter)


# -- other picklers
def test_serialize_splits_a_value_into_bytes_and_tensors() -> None:
    value = {"a": torch.arange(3), "b": [1, "x"]}
    data, tensors = serialize(value)
    assert isinstance(data, bytes) and [t.tolist() for t in tensors] == [[0, 1, 2]]
    again = deserialize(data, [tensors[0] + 1])
    assert again["a"].tolist() == [1, 2, 3] and again["b"] == [1, "x"]


@functions.async_execution
def marked(x: int) -> Any:
    return rpc_async("worker2", abs, (x,))


class Keywords:
    def __call__(self, **kwargs: int) -> dict[str, int]:
        return kwargs

    get = __call__


def test_a_proxy_passes_on_keywords_of_any_name(agents: list[Agent]) -> None:
    rref, given = remote("worker1", Keywords), {"method": 1, "worker": 2, "serial": 3, "incarnation": 4, "name": 5}
    assert rref.rpc_sync().get(**given) == rref.rpc_sync()(**given) == given
    assert rref.rpc_async().get(**given).wait() == rref.rpc_async()(**given).wait() == given
    assert rref.remote().get(**given).to_here() == rref.remote()(**given).to_here() == given


def test_calls_can_use_another_pickler(agents: list[Agent]) -> None:
    packed: list[Any] = []

    class Recording:
        def serialize(self, obj: Any) -> Any:
            packed.append(obj)
            return _internal_rpc_pickler.serialize(obj)

    with api._use_rpc_pickler(Recording()):
        assert rpc_sync("worker1", marked, (-3,)) == remote("worker1", marked, (-3,)).to_here() == 3
        packed.clear()
        assert rpc_sync("worker1", torch.add, (torch.ones(1), 1)).item() == 2
        assert remote("worker1", Counter, kwargs={"begin": 4}).rpc_sync().up() == 5
    assert [call.func for call in packed] == [torch.add, Counter] and packed[1].kwargs == {"begin": 4}
    assert api._default_pickler is _internal_rpc_pickler


# -- waiting for several
def test_a_wait_all_block_waits_for_its_calls_and_raises_their_error(agents: list[Agent]) -> None:
    with pytest.raises(ValueError, match="invalid literal"), api._wait_all():
        rpc_async("worker1", int, ("x",))
    with api._wait_all():
        futures = [rpc_async("worker1", time.sleep, (0.05,)), rpc_async("worker2", abs, (-1,))]
        rpc_sync("worker1", abs, (1,))
        assert api._thread_local_var.future_list == futures
    assert all(future.done() for future in futures) and not hasattr(api._thread_local_var, "future_list")


@pytest.mark.parametrize("wait_all", [torch.futures.wait_all, rpc.api.wait_all])
def test_wait_all_raises_the_first_error_at_once(agents: list[Agent], wait_all: Any) -> None:
    gate = threading.Event()
    Gates.gates.append(gate)
    slow = rpc_async("worker1", Gates.wait, (len(Gates.gates) - 1,))
    begin = time.monotonic()
    with pytest.raises(ValueError, match="invalid literal"):
        wait_all([slow, rpc_async("worker2", int, ("x",))])
    assert not slow.done() and time.monotonic() - begin < 10
    gate.set()
    until(slow.done, "the slow call")
    assert [f.wait() for f in torch.futures.collect_all([slow, rpc_async("worker2", int)]).wait()] == [True, 0]


class Gates:
    """Events that a call in this process can wait for, by number."""

    gates: list[threading.Event] = []

    @staticmethod
    def wait(number: int) -> bool:
        return Gates.gates[number].wait(20)
