"""Mistakes of users, and the errors that torch raises for them: the class, and words that programs match on.

Each row is an expression, the class, and a part of the text. `python mistakes.py` tries all of them with torch's own
RPC and prints the rows with other errors; `python mistakes.py ours` does so with rpcbench. tests/rpc/test_mistakes.py
runs both, in one process each: `OUTSIDE` without an initialized world, `INSIDE` in a world of one member, named "me".
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle  # noqa: F401  (for the expressions, as torch is)
import sys
import tempfile
import threading  # noqa: F401
import time  # noqa: F401
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc

Row = tuple[str, type[Exception], str]

FUTURES: list[Row] = [
    ("done().set_result(2)", RuntimeError, "Future can only be marked completed once"),
    ("done().set_exception(ValueError())", RuntimeError, "Attempting to mark a completed Future as complete again"),
    ("Future().set_exception('x')", AssertionError, "x is of type <class 'str'>, not an Exception."),
    ("Future().set_exception(ValueError)", AssertionError, "is of type <class 'type'>, not an Exception."),
    ("Future().value()", RuntimeError, "completed"),
    ("Future().then(None)", TypeError, "then(): incompatible function arguments"),
    ("done().then(3)", TypeError, "then(): incompatible function arguments"),
    ("Future().add_done_callback(None)", TypeError, "add_done_callback(): incompatible function arguments"),
    ("done().add_done_callback(3)", TypeError, "add_done_callback(): incompatible function arguments"),
    ("done().then(lambda f: f + 1).wait()", RuntimeError, "error when running the callback: TypeError:"),
    ("done().then(lambda: 1).wait()", RuntimeError, "error when running the callback: TypeError:"),
    ("failed().wait()", KeyError, "why"),
    ("failed().value()", KeyError, "why"),
    ("Future(devices=['cpu'])", ValueError, "Expected devices to have indices, got cpu"),
    ("Future(1)", TypeError, "positional argument"),
    ("pickle.dumps(Future())", RuntimeError, "Can not pickle torch.futures.Future"),
    ("torch.futures.collect_all([done(), 3])", TypeError, "_collect_all(): incompatible function arguments"),
    ("torch.futures.collect_all(None)", TypeError, "_collect_all(): incompatible function arguments"),
    ("torch.futures.wait_all(done())", TypeError, "_collect_all(): incompatible function arguments"),
    ("torch.futures.wait_all([failed()])", KeyError, "why"),
]

RPC, AGENT = "RPC has not been initialized. ", "Current RPC agent is not set! Did you initialize the RPC framework"
GRAD = "Need to initialize distributed autograd"
UNINITIALIZED: list[Row] = [
    ("rpc.rpc_sync('w', max, (1, 2))", RuntimeError, RPC),
    ("rpc.rpc_async('w', max, (1, 2))", RuntimeError, RPC),
    ("rpc.remote('w', max, (1, 2))", RuntimeError, RPC),
    ("rpc.shutdown()", RuntimeError, RPC),
    ("rpc.get_worker_info()", RuntimeError, RPC),
    ("rpc._get_debug_info()", RuntimeError, RPC),
    ("rpc.api._all_gather(1)", RuntimeError, RPC),
    ("rpc.api._barrier({'w'})", RuntimeError, RPC),
    ("rpc.api._wait_all_workers()", RuntimeError, RPC),
    ("rpc.RRef(1)", RuntimeError, AGENT),
    ("rpc.get_rpc_timeout()", RuntimeError, AGENT),
    ("rpc._set_rpc_timeout(1)", RuntimeError, AGENT),
    ("rpc._get_current_rpc_agent()", RuntimeError, AGENT),
    ("rpc._rref_context_get_debug_info()", RuntimeError, AGENT),
    ("rpc.enable_gil_profiling(True)", RuntimeError, AGENT),
    ("autograd.context().__enter__()", RuntimeError, GRAD),
    ("autograd.backward(1, [scalar()])", RuntimeError, GRAD),
    ("autograd.get_gradients(1)", RuntimeError, GRAD),
    ("autograd._retrieve_context(1)", RuntimeError, GRAD),
    ("RemoteModule('w', torch.nn.Linear, (1, 1))", AssertionError, "RemoteModule only works in RPC."),
]

NAME = "must be non-empty and shorter than 128 chars, but got"
INIT: list[Row] = [
    ("init(backend='gloo')", TypeError, "Argument backend must be a member of BackendType"),
    ("init(rpc_backend_options=3)", TypeError, "rpc_backend_options must be an instance of RpcBackendOptions"),
    ("init(rpc_backend_options=rpc.RpcBackendOptions())", TypeError, "Could not infer backend for options"),
    ("init(at='ftp://x')", RuntimeError, "No rendezvous handler for ftp://"),
    ("init(at='nonsense')", RuntimeError, "No rendezvous handler for ://"),
    ("init(at='tcp://localhost')", ValueError, "tcp:// rendezvous: port number missing"),
    ("init(at='tcp://localhost:abc')", ValueError, "Port could not be cast to integer value as 'abc'"),
    ("init(at='tcp://localhost:1', rank=-1)", ValueError, "tcp:// rendezvous: rank parameter missing"),
    ("init(at='file:///tmp/x', rank=-1)", ValueError, "file:// rendezvous: rank parameter missing"),
    ("init(at='file://')", ValueError, "file:// rendezvous: path missing"),
    ("init(at='env://', rank=-1)", ValueError, "environment variable RANK expected, but not set"),
    ("init(at='env://')", ValueError, "environment variable MASTER_ADDR expected, but not set"),
    ("init(at='tcp://localhost:1', rank=-1, world_size=None)", ValueError, "rank parameter missing"),
    ("init(name=3)", RuntimeError, "must be of type <class 'str'> but got type <class 'int'>"),
    ("init(name='')", RuntimeError, NAME),
    ("init(name='a b')", RuntimeError, NAME),
    ("init(name=128 * 'a')", RuntimeError, NAME),
    ("rpc.WorkerInfo('a b', 0)", RuntimeError, NAME),
    ("rpc.WorkerInfo('a')", TypeError, ""),
    ("rpc.TensorPipeRpcBackendOptions(rpc_timeout=-1)", RuntimeError, "RPC Timeout must be non-negative"),
    ("rpc.RpcBackendOptions(rpc_timeout=-1)", RuntimeError, "RPC Timeout must be non-negative"),
    ("rpc.TensorPipeRpcBackendOptions(rpc_timeout='1')", TypeError, "incompatible constructor arguments"),
    ("rpc.TensorPipeRpcBackendOptions(num_worker_threads=0)", RuntimeError, "must be positive, got 0"),
    ("rpc.TensorPipeRpcBackendOptions(num_worker_threads='1')", TypeError, "incompatible constructor arguments"),
    ("rpc.TensorPipeRpcBackendOptions(init_method=3)", TypeError, "incompatible constructor arguments"),
    ("rpc.TensorPipeRpcBackendOptions(devices=['cpu'])", ValueError, "`set_devices` expect a list of CUDA devices"),
    ("register('TENSORPIPE', max, max)", RuntimeError, "RPC backend TENSORPIPE: already registered"),
    ("rpc.BackendType.NOPE", AttributeError, "NOPE"),
    ("rpc.BackendType['NOPE']", KeyError, "NOPE"),
    ("start(store=3, rpc_backend_options=options())", TypeError, "`store` must be a c10d::Store"),
    ("start(store=hash_store(), rpc_backend_options=3)", TypeError, "must be a `TensorPipeRpcBackendOptions`"),
    ("rpc.RRef()", TypeError, ""),
]

CALLS: list[Row] = [
    ("init()", RuntimeError, "RPC is already initialized"),
    ("rpc.rpc_sync('nope', max, (1, 2))", RuntimeError, "could not find destination name nope"),
    ("rpc.rpc_async(7, max, (1, 2))", RuntimeError, "could not find destination id 7"),
    ("rpc.remote(rpc.WorkerInfo('nope', 9), max, (1, 2))", RuntimeError, "could not find destination"),
    ("rpc.get_worker_info('nope')", RuntimeError, "could not find destination name nope"),
    ("rpc.rpc_sync(1.5, max, (1, 2))", ValueError, "Cannot get WorkerInfo from name 1.5"),
    ("rpc.rpc_sync(None, max, (1, 2))", ValueError, "Cannot get WorkerInfo from name None"),
    ("rpc.rpc_sync('me', 3)", TypeError, "function should be callable."),
    ("rpc.rpc_sync('me', max, 3)", TypeError, ""),
    ("rpc.rpc_sync('me', max, (1, 2), [1])", TypeError, ""),
    ("rpc.rpc_sync('me', max, (1, 2), {1: 2})", TypeError, "keywords must be strings"),
    ("rpc.rpc_sync('me', torch.add, ('a', 1))", RuntimeError, "Overloaded torch operator invoked from Python failed"),
    ("rpc.rpc_sync('me', torch.mm, (torch.ones(2), torch.ones(3)))", RuntimeError, "self must be a matrix"),
    ("rpc.rpc_sync('me', time.sleep, (1,), timeout=0.1)", RuntimeError, "RPC ran for more than set timeout (100 ms)"),
    ("rpc.rpc_sync('me', max, (1, 2), timeout='1')", TypeError, ""),
    ("rpc.rpc_sync('me', max, (threading.Lock(),))", TypeError, "cannot pickle '_thread.lock' object"),
    ("rpc.rpc_sync('me', threading.Lock)", RuntimeError, "cannot pickle '_thread.lock' object"),
    ("rpc.rpc_sync('me', max, (torch.futures.Future(),))", RuntimeError, "Can not pickle torch.futures.Future"),
    ("rpc.rpc_sync('me', not_a_future)", RuntimeError, ""),
    ("rpc.rpc_sync('me', int, ('a',))", ValueError, "invalid literal for int() with base 10"),
    ("rpc.rpc_async('me', int, ('a',)).wait()", ValueError, "invalid literal for int() with base 10"),
    ("rpc.remote('me', int, ('a',)).to_here()", ValueError, "invalid literal for int() with base 10"),
    ("rpc.rpc_async('me', int, ('a',)).then(None)", TypeError, "then(): incompatible function arguments"),
    ("rpc._set_rpc_timeout('1')", TypeError, "incompatible function arguments"),
    ("rpc._set_and_start_rpc_agent(3)", TypeError, ""),
    ("rpc.internal.serialize(threading.Lock())", TypeError, "cannot pickle '_thread.lock' object"),
]

RREFS: list[Row] = [
    ("pickle.dumps(rpc.RRef(1))", RuntimeError, "Can not pickle rref in python pickler"),
    ("rpc.RRef(1, type_hint=int)", RuntimeError, "type_hint should only be specified when the RRef being created"),
    ("rpc.RRef(1).nope", AttributeError, "has no attribute 'nope'"),
    ("rpc.RRef(1)()", TypeError, "object is not callable"),
    ("rpc.RRef(1).rpc_sync().nope()", AttributeError, "has no attribute 'nope'"),
    ("rpc.RRef(1).rpc_async().nope().wait()", AttributeError, "has no attribute 'nope'"),
    ("rpc.RRef(1).remote().nope().to_here()", AttributeError, "has no attribute 'nope'"),
    ("rpc.RRef(1).backward()", RuntimeError, "RRef should contain a tensor for .backward()"),
    ("rpc.RRef(leaf() * 1).backward()", RuntimeError, "grad can be implicitly created only for scalar outputs"),
    ("rpc.RRef(torch.ones(())).backward()", RuntimeError, "does not require grad and does not have a grad_fn"),
    ("rpc.RRef(scalar()).backward(100)", RuntimeError, "Could not find autograd context with id: 100"),
]

AUTOGRAD: list[Row] = [
    ("autograd._current_context()", RuntimeError, "Current thread doesn't have a valid autograd context."),
    ("autograd.backward(100, [leaf() * 1])", RuntimeError, "Could not find autograd context with id: 100"),
    ("autograd.get_gradients(100)", RuntimeError, "Could not find autograd context with id: 100"),
    ("autograd._retrieve_context(100)", RuntimeError, "Could not find autograd context with id: 100"),
    ("autograd._release_context(100)", RuntimeError, "Could not find autograd context with id: 100"),
    ("autograd.get_gradients('a')", TypeError, "incompatible function arguments"),
    ("within(lambda c: autograd.context().__enter__())", RuntimeError, "Already have an autograd context id for this"),
    ("within(lambda c: autograd.backward('a', [scalar()]))", TypeError, "incompatible function arguments"),
    ("within(lambda c: autograd.backward(c, []))", RuntimeError, "No tensors provided for gradient computation"),
    ("within(lambda c: autograd.backward(c, None))", TypeError, "incompatible function arguments"),
    ("within(lambda c: autograd.backward(c, scalar()))", TypeError, "incompatible function arguments"),
    ("within(lambda c: autograd.backward(c, [None]))", TypeError, "incompatible function arguments"),
    ("within(lambda c: autograd.backward(c, [leaf() * 1]))", RuntimeError, "is not a scalar, all roots need to be"),
    ("within(lambda c: autograd.backward(c, [torch.ones(1)]))", RuntimeError, "requires_grad not set on root"),
    ("within(lambda c: autograd.backward(c, [leaf(1)]))", RuntimeError, "does not have a valid gradient function"),
    ("within(lambda c: twice(c, leaf().pow(2).sum()))", RuntimeError, "Error on Node 0: Trying to backward through"),
]

LAYERS: list[Row] = [
    ("optimizer(None)", TypeError, "object is not iterable"),
    ("optimizer([rpc.RRef(leaf())], nope=1)", TypeError, "got an unexpected keyword argument 'nope'"),
    ("optimizer([rpc.RRef(leaf())]).step(100)", RuntimeError, "Could not find autograd context with id: 100"),
    ("optimizer([rpc.RRef(leaf())]).step('a')", TypeError, "incompatible function arguments"),
    ("RemoteModule('me/a/b', torch.nn.Linear, (1, 1))", ValueError, "Could not parse remote_device: me/a/b."),
    ("RemoteModule('', torch.nn.Linear, (1, 1))", ValueError, "Could not parse remote_device: ."),
    ("RemoteModule('me/nonsense', torch.nn.Linear, (1, 1))", RuntimeError, "Expected one of cpu, cuda"),
    ("RemoteModule(3, torch.nn.Linear, (1, 1))", TypeError, "Invalid type for remote_device"),
    ("RemoteModule('nope/cpu', torch.nn.Linear, (1, 1))", RuntimeError, "could not find destination name nope"),
    ("RemoteModule('me/cpu', dict).forward()", ValueError, "returns an instance of <class nn.Module>, but it returns"),
    ("RemoteModule('me/cpu', torch.nn.Linear, (1,)).forward()", TypeError, "missing 1 required positional argument"),
    ("linear().parameters()", ValueError, "Please use ``remote_parameters`` instead."),
    ("linear().state_dict()", ValueError, "Method ``state_dict`` not supported for RemoteModule"),
    ("linear().to('cpu')", ValueError, "Method ``to`` not supported for RemoteModule"),
    ("linear().nope", AttributeError, "object has no attribute 'nope'"),
    ("linear().forward('a')", TypeError, "linear(): argument 'input' (position 1) must be Tensor, not str"),
    ("pickle.dumps(linear())", RuntimeError, "Cannot pickle RemoteModule in python pickler."),
]

OUTSIDE = FUTURES + UNINITIALIZED + INIT
INSIDE = CALLS + RREFS + AUTOGRAD + LAYERS


@torch.distributed.rpc.functions.async_execution
def not_a_future() -> int:
    return 3


def leaf(size: int = 2) -> torch.Tensor:
    return torch.ones(size, requires_grad=True)


def scalar() -> torch.Tensor:
    return leaf().sum()


def names(ours: bool) -> dict[str, Any]:
    """The names that the expressions use, of torch or of rpcbench."""
    package, future = ("rpcbench", "rpcbench.rpc") if ours else ("torch.distributed", "torch.futures")
    rpc, autograd, optim, nn = (
        importlib.import_module(f"{package}.{part}") for part in ("rpc", "autograd", "optim", "nn")
    )
    future_class = importlib.import_module(future).Future

    def init(name: Any = "me", rank: int = 0, world_size: int | None = 1, at: str = "", **other: Any) -> None:
        with tempfile.TemporaryDirectory() as directory:
            if not other:
                url = at or f"file://{directory}/meet"
                other["rpc_backend_options"] = rpc.TensorPipeRpcBackendOptions(init_method=url)
            rpc.init_rpc(name, rank=rank, world_size=world_size, **other)

    def done() -> Any:
        future = future_class()
        future.set_result(1)
        return future

    def failed() -> Any:
        future = future_class()
        future.set_exception(KeyError("why"))
        return future

    def within(use: Any) -> None:
        with autograd.context() as context_id:
            use(context_id)

    def twice(context_id: int, loss: torch.Tensor) -> None:
        autograd.backward(context_id, [loss])
        autograd.backward(context_id, [loss])

    return {
        **globals(),
        "rpc": rpc,
        "autograd": autograd,
        "RemoteModule": nn.RemoteModule,
        "Future": future_class,
        "init": init,
        "done": done,
        "failed": failed,
        "within": within,
        "twice": twice,
        "options": rpc.TensorPipeRpcBackendOptions,
        "register": rpc.backend_registry.register_backend,
        "hash_store": torch.distributed.HashStore,
        "linear": lambda: nn.RemoteModule("me/cpu", torch.nn.Linear, (1, 1)),
        "optimizer": lambda params, **kw: optim.DistributedOptimizer(torch.optim.SGD, params, lr=1, **kw),
        "start": lambda **kw: rpc.backend_registry.init_backend(
            rpc.BackendType.TENSORPIPE, name="me", rank=0, world_size=1, **kw
        ),
    }


def answer(row: Row, space: dict[str, Any]) -> str:
    """The difference between the error of a mistake and its row, "" for none."""
    expression, kind, words = row
    try:
        eval(expression, space)
    except Exception as error:
        right = isinstance(error, kind) and words in str(error)
        return "" if right else f"{expression} raises {type(error).__name__}: {str(error)[:300]}"
    return f"{expression} raises nothing"


@contextlib.contextmanager
def world_of_one(rpc: Any) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{Path(directory, 'meet')}")
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
        yield
        rpc.shutdown()


def main() -> None:
    space = names(ours=sys.argv[1:] == ["ours"])
    found = [answer(row, space) for row in OUTSIDE]
    with world_of_one(space["rpc"]):
        found += [answer(row, space) for row in INSIDE]
    print(json.dumps([line for line in found if line]), flush=True)
    os._exit(0)  # torch's own threads may not end cleanly after so many mistakes


if __name__ == "__main__":
    main()
