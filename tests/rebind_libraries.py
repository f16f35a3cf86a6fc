"""Programs that use torch's RPC as PyTorch Geometric, torchrl and PiPPy do, without any reference to rpcbench.

`rpcbench run rebind_libraries.py NAME` forks the workers of one program, as functions of a module, not of `__main__`;
each worker prints its results, and tests/test_rebind.py has the expected ones.
"""

import atexit
import collections
import functools
import importlib
import os
import sys
import threading
import time

import torch
import torch.fx
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc


def address():
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29545")


# -- as PyTorch Geometric: calls by number, and an end that asks C++ whether there is an agent
calls = {}


def is_initialized():
    from torch._C._distributed_rpc import _is_current_rpc_agent_set

    return _is_current_rpc_agent_set()


@rpc.api._require_initialized
def gather(value, timeout=None):
    return rpc.api._all_gather(value) if timeout is None else rpc.api._all_gather(value, timeout=timeout)


@rpc.api._require_initialized
def register(call):
    calls[len(calls)] = call
    return len(calls) - 1


def run_call(number, *args, **kwargs):
    return calls[number](*args, **kwargs)


def end(graceful=True):
    if is_initialized():
        rpc.shutdown(graceful)


def geometric(rank, size):
    atexit.register(end, False)
    try:
        gather(None)
    except RuntimeError as error:
        early = str(error).split(".")[0]
    options = rpc.TensorPipeRpcBackendOptions(
        _transports=["ibv", "uv"],
        _channels=["mpt_uv", "basic"],
        num_worker_threads=4,
        rpc_timeout=30,
        init_method="tcp://localhost:29545",
    )
    before = is_initialized()
    rpc.init_rpc(name=f"dist-{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    roles = gather(("worker", size, rank), timeout=30)
    number = register(lambda ids, scale=1: ids * scale * (rank + 1))
    gather(None)
    others = [name for name, (_, _, other) in sorted(roles.items()) if other != rank]
    futures = [
        rpc.rpc_async(to=to, func=run_call, args=(number, torch.arange(3)), kwargs={"scale": 2}) for to in others
    ]
    found = [future.wait().tolist() for future in futures]
    if rank:  # rank 0 shuts down at once, and must still answer this call
        found.append(rpc.rpc_sync("dist-0", run_call, args=(number, torch.ones(1, dtype=torch.long))).tolist())
    sys.stdout.write(f"{early} {before} {found}\n")
    end()


# -- as torchrl's remote replay buffer: methods take the object, or an RRef of it
def accepts_rref(method):
    @functools.wraps(method)
    def called(self, *args, **kwargs):
        if isinstance(self, torch._C._distributed_rpc.PyRRef):
            self = self.local_value()
        return method(self, *args, **kwargs)

    return called


class Buffer:
    def __init__(self, capacity):
        self.rows = collections.deque(maxlen=capacity)
        self.lock = threading.RLock()

    @accepts_rref
    def add(self, row):
        with self.lock:
            self.rows.append(row)
            return len(self.rows) - 1

    @accepts_rref
    def sample(self, count):
        with self.lock:
            return torch.stack([row["observation"] for row in list(self.rows)[:count]])

    @accepts_rref
    def __len__(self):
        return len(self.rows)


class Gatherer:
    def __init__(self, buffer):
        self.id, self.buffer = rpc.get_worker_info().id, buffer

    @accepts_rref
    def collect(self, count):
        for _ in range(count):
            row = {"observation": torch.full((2,), float(self.id))}
            index = rpc.remote(self.buffer.owner(), Buffer.add, args=(self.buffer, row))
            index.to_here()


def replay(rank, size):
    address()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, _transports=["uv"], rpc_timeout=30)
    name = ["Trainer", "ReplayBuffer", "DataCollector"][rank]
    kind = rpc.BackendType.TENSORPIPE
    rpc.init_rpc(name, rank=rank, backend=kind, rpc_backend_options=options, world_size=size)
    if rank == 0:
        buffer = rpc.remote(rpc.get_worker_info("ReplayBuffer"), Buffer, args=(100,))
        gatherer = rpc.remote(rpc.get_worker_info("DataCollector"), Gatherer, args=(buffer,))
        collected = rpc.remote(gatherer.owner(), Gatherer.collect, args=(gatherer, 4))
        while not rpc.rpc_sync(buffer.owner(), Buffer.__len__, args=(buffer,)):
            continue
        collected.to_here()
        sample = rpc.rpc_sync(buffer.owner(), Buffer.sample, args=(buffer, 3))
        print(sample.tolist(), rpc.rpc_sync(buffer.owner(), Buffer.__len__, args=(buffer,)))
    rpc.shutdown()


# -- as torchrl's RPC collector: batches of the worker that finishes first, and new weights for it
class Collector:
    def __init__(self, make_environment, policy, frames):
        self.state, self.policy, self.frames = make_environment(), policy, frames
        self.closed = False

    @accepts_rref
    def next(self):
        with torch.no_grad():
            states = [self.policy(self.state) for _ in range(self.frames)]
        return torch.stack(states)

    @accepts_rref
    def update_policy_weights_(self, weights):
        self.policy.load_state_dict(weights)

    @accepts_rref
    def shutdown(self):
        self.closed = True


def options_of(visible_devices=None):
    common = {"num_worker_threads": 16, "rpc_timeout": 30, "_transports": ["uv"]}
    return rpc.TensorPipeRpcBackendOptions(devices=visible_devices, **common)


def find_worker(name):
    while True:
        try:
            return rpc.get_worker_info(name)
        except RuntimeError:
            time.sleep(0.1)


def collector(rank, size):
    address()
    name = f"COLLECTOR_NODE_{rank}" if rank else "TRAINER_NODE"
    kind = rpc.BackendType.TENSORPIPE
    rpc.init_rpc(name, rank=rank, backend=kind, rpc_backend_options=options_of(), world_size=size)
    if rank:
        rpc.shutdown()
        return
    policy = nn.Linear(2, 1, bias=False)
    nn.init.ones_(policy.weight)
    infos = [find_worker(f"COLLECTOR_NODE_{n}") for n in range(1, size)]
    make = [functools.partial(torch.full, (2,), float(info.id)) for info in infos]
    rrefs = [
        rpc.remote(info, Collector, args=(made, policy), kwargs={"frames": 2})
        for info, made in zip(infos, make, strict=True)
    ]
    ask = [functools.partial(rpc.rpc_async, rref.owner(), Collector.next, args=(rref,)) for rref in rrefs]
    pending = collections.deque((begin(), n) for n, begin in enumerate(ask))
    batches = {0: [], 1: []}
    weights = {name: 10 * value for name, value in policy.state_dict().items()}
    while pending:
        future, n = pending.popleft()
        if not future.done():
            pending.append((future, n))
            continue
        batches[n].append(future.value().flatten().tolist())
        if len(batches[n]) < 2:
            update = rpc.rpc_async(infos[n], Collector.update_policy_weights_, args=(rrefs[n], weights))
            update.wait()
            pending.append((ask[n](), n))
    for info, rref in zip(infos, rrefs, strict=True):
        rpc.rpc_sync(info, Collector.shutdown, args=(rref,), timeout=10)
    print(batches)
    rpc.shutdown(timeout=30)


# -- as PiPPy's driver: stages take RRefs, fetch their values, and run when all have arrived
class Executor:
    def __init__(self, rank, module):
        self.rank, self.module = rank, module
        self.ready, self.waiting = {}, {}
        self.changed = threading.Condition(threading.Lock())
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            with self.changed:
                while not self.ready:
                    self.changed.wait()
                args, values, future = self.ready.pop(next(iter(self.ready)))
            given = iter(values.values())
            args = torch.fx.node.map_aggregate(args, lambda a, given=given: next(given) if is_rref(a) else a)
            future.set_result(self.module(*args))

    @rpc.functions.async_execution
    def invoke(self, key, args, debug=""):
        rrefs = []
        torch.fx.node.map_aggregate(args, lambda a: rrefs.append(a) if is_rref(a) else None)
        future = torch.futures.Future()
        with self.changed:
            if rrefs:
                self.waiting[key] = (args, {}, future, len(rrefs))
            else:
                self.ready[key] = (args, {}, future)
                self.changed.notify()
        me = rpc.RRef(self)
        for index, rref in enumerate(rrefs):
            rpc.rpc_async(to=self.rank, func=transfer, args=(me, rref, index, key))
        return future

    def events(self):
        return f"rank {self.rank} has {len(self.waiting)} waiting"


def is_rref(value):
    return isinstance(value, torch._C._distributed_rpc.PyRRef)


def value_of(rref):
    return rref.local_value()


@rpc.functions.async_execution
def transfer(executor, rref, index, key):
    self = executor.local_value()

    def arrived(future):
        with self.changed:
            args, values, answer, missing = self.waiting[key]
            values[index] = future.value()
            if len(values) == missing:
                del self.waiting[key]
                self.ready[key] = (args, dict(sorted(values.items())), answer)
                self.changed.notify()

    return rpc.rpc_async(to=rref.owner(), func=value_of, args=(rref,)).then(arrived)


class Halves(nn.Module):
    def forward(self, x):
        return x * 2, x + 1


class Sum(nn.Module):
    def forward(self, a, b, factor):
        return (a + b) * factor


def pippy(rank, size):
    address()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        first = rpc.remote(1, Executor, args=(), kwargs={"rank": 1, "module": Halves()})
        second = rpc.remote(2, Executor, args=(), kwargs={"rank": 2, "module": Sum()})
        outputs = []
        for chunk, x in enumerate(torch.arange(4.0).split(2)):
            halves = first.remote().invoke(f"{chunk}_halves", (x,), debug="halves")
            parts = [halves.remote().__getitem__(index) for index in (0, 1)]
            outputs.append(second.remote().invoke(f"{chunk}_sum", (*parts, 10)))
        while not all(rref.confirmed_by_owner() for rref in outputs):
            pass
        values = torch.fx.node.map_aggregate(outputs, lambda a: a.to_here() if is_rref(a) else a)
        print([value.tolist() for value in values], first.rpc_sync().events())
    rpc.shutdown()


SIZES = {geometric: 2, replay: 3, collector: 3, pippy: 3}

if __name__ == "__main__":
    library = importlib.import_module("rebind_libraries")
    run = getattr(library, sys.argv[1])
    mp.start_processes(run, args=(library.SIZES[run],), nprocs=library.SIZES[run], start_method="fork")
