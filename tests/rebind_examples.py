"""Programs with the names and the style of those in pytorch/examples, without any reference to rpcbench.

`rpcbench run rebind_examples.py NAME` forks the workers of one program, which prints its results; tests/test_rebind.py
has the expected ones.
"""

import os
import sys
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions, remote, rpc_async, rpc_sync
from torch.nn.parallel import DistributedDataParallel


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def on_owner(how, method, rref, *args, **kwargs):
    return how(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


def parameter_rrefs(module):
    return [RRef(parameter) for parameter in module.parameters()]


def begin(name, rank, size, **options):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29544")
    chosen = {"rpc_backend_options": TensorPipeRpcBackendOptions(**options)} if options else {}
    rpc.init_rpc(name, rank=rank, world_size=size, **chosen)


# -- batch: a server answers its trainers once all have given their gradients
class Averager:
    def __init__(self, trainers):
        self.model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.optimizer = optim.SGD(self.model.parameters(), lr=1.0)
        self.model.weight.grad = torch.zeros_like(self.model.weight)
        self.lock, self.trainers, self.given = threading.Lock(), trainers, 0
        self.updated = torch.futures.Future()

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(rref, gradients):
        self = rref.local_value()
        with self.lock:
            self.model.weight.grad += gradients[0] / self.trainers
            self.given += 1
            answer = self.updated
            if self.given == self.trainers:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.given, self.updated = 0, torch.futures.Future()
                answer.set_result(self.model)
        return answer


def train_with(averager):
    model = averager.rpc_sync().get_model()
    for _ in range(2):
        (model(torch.ones(1, 2)) * rpc.get_worker_info().id).sum().backward()
        given = [parameter.grad for parameter in model.parameters()]
        model = rpc.rpc_sync(averager.owner(), Averager.update_and_fetch, args=(averager, given))
    return model.weight.tolist()


def batch(rank, size):
    begin("ps" if rank == 0 else f"trainer{rank}", rank, size, num_worker_threads=8, rpc_timeout=30)
    if rank == 0:
        averager = rpc.RRef(Averager(size - 1))
        futures = [rpc.rpc_async(f"trainer{n}", train_with, args=(averager,)) for n in range(1, size)]
        print(torch.futures.wait_all(futures))
    rpc.shutdown()


# -- parameter server: one model, made by the first call that asks for it
class Server(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))

    def forward(self, x):
        return self.model(x.to("cpu"))

    def gradients(self, context_id):
        return {k.to("cpu"): v.to("cpu") for k, v in dist_autograd.get_gradients(context_id).items()}

    def parameters_as_rrefs(self):
        return parameter_rrefs(self.model)


servers = []
servers_lock = threading.Lock()


def get_server():
    with servers_lock:
        if not servers:
            servers.append(Server())
        return servers[0]


class TrainerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.server = rpc.remote("parameter_server", get_server)

    def forward(self, x):
        return on_owner(rpc_sync, Server.forward, self.server, x)


def parameter_server(rank, size):
    begin("parameter_server" if rank == 0 else f"trainer_{rank}", rank, size)
    if rank:
        net = TrainerNet()
        optimizer = DistributedOptimizer(optim.SGD, on_owner(rpc_sync, Server.parameters_as_rrefs, net.server), lr=0.03)
        for _ in range(3):
            with dist_autograd.context() as context_id:
                loss = nn.functional.cross_entropy(net(torch.rand(5, 4)), torch.zeros(5, dtype=torch.long))
                dist_autograd.backward(context_id, [loss])
                gradients = on_owner(rpc_sync, Server.gradients, net.server, context_id)
                optimizer.step(context_id)
        print(len(gradients), loss.item() > 0)
    rpc.shutdown()


# -- pipeline: micro-batches through RRefs of two stages
class Stage(nn.Module):
    def __init__(self, device, factor):
        super().__init__()
        self.lock, self.device = threading.Lock(), device
        self.weight = nn.Parameter(torch.tensor(float(factor)))

    def forward(self, x_rref):
        x = x_rref.to_here().to(self.device)
        with self.lock:
            return (self.weight * x).cpu()


class Stages(nn.Module):
    def __init__(self, split_size, workers):
        super().__init__()
        self.split_size = split_size
        self.stages = [rpc.remote(to, Stage, args=("cpu",), kwargs={"factor": 2}) for to in workers]

    def forward(self, xs):
        futures = []
        for x in iter(xs.split(self.split_size, dim=0)):
            y_rref = on_owner(remote, Stage.forward, self.stages[0], RRef(x))
            futures.append(on_owner(rpc_async, Stage.forward, self.stages[1], y_rref))
        return torch.cat(torch.futures.wait_all(futures))

    def parameter_rrefs(self):
        return [rref for stage in self.stages for rref in on_owner(remote, parameter_rrefs, stage).to_here()]


def pipeline(rank, size):
    begin(f"worker{rank}" if rank else "master", rank, size, num_worker_threads=16)
    if rank == 0:
        model = Stages(2, ["worker1", "worker2"])
        optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.25)
        with dist_autograd.context() as context_id:
            outputs = model(torch.ones(6, 1))
            dist_autograd.backward(context_id, [nn.MSELoss()(outputs, torch.full((6, 1), 3.0))])
            optimizer.step(context_id)
        print(outputs.flatten().tolist(), [rref.to_here().item() for rref in model.parameter_rrefs()])
    rpc.shutdown()


# -- rl: observers ask an agent for actions
class Observer:
    def __init__(self):
        self.id, self.state = rpc.get_worker_info().id, 0

    def run_episode(self, agent_rref, steps):
        for _ in range(steps):
            self.state += on_owner(rpc_sync, Agent.select_action, agent_rref, self.id, self.state)
            on_owner(rpc_sync, Agent.report_reward, agent_rref, self.id, float(self.state))


class Agent:
    def __init__(self, size):
        self.agent_rref, self.rewards = RRef(self), {}
        infos = [rpc.get_worker_info(f"observer{rank}") for rank in range(1, size)]
        self.observers = [remote(info, Observer) for info in infos]
        self.rewards = {info.id: [] for info in infos}

    def select_action(self, observer, state):
        return observer + state

    def report_reward(self, observer, reward):
        self.rewards[observer].append(reward)

    def run_episode(self, steps):
        called = [on_owner(rpc_async, Observer.run_episode, rref, self.agent_rref, steps) for rref in self.observers]
        for future in called:
            future.wait()


def rl(rank, size):
    begin(f"observer{rank}" if rank else "agent", rank, size)
    if rank == 0:
        agent = Agent(size)
        agent.run_episode(3)
        print(agent.rewards)
    rpc.shutdown()


# -- rnn: embedding and decoder on a server, the LSTM here
class Recurrent(nn.Module):
    def __init__(self, server, tokens, width):
        super().__init__()
        self.embedding = rpc.remote(server, nn.Embedding, args=(tokens, width))
        self.rnn = nn.LSTM(width, width, 1)
        self.decoder = rpc.remote(server, nn.Linear, args=(width, tokens))

    def forward(self, tokens, hidden):
        embedded = on_owner(rpc_sync, nn.Embedding.forward, self.embedding, tokens)
        output, hidden = self.rnn(embedded, hidden)
        return on_owner(rpc_sync, nn.Linear.forward, self.decoder, output), hidden

    def parameter_rrefs(self):
        there = [on_owner(rpc_sync, parameter_rrefs, rref) for rref in (self.embedding, self.decoder)]
        return [*there[0], *parameter_rrefs(self.rnn), *there[1]]


def rnn(rank, size):
    begin("ps" if rank else "trainer", rank, size, num_worker_threads=16)
    if rank == 0:
        torch.manual_seed(0)
        model, losses = Recurrent("ps", 5, 4), []
        optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5)
        hidden = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
        for _ in range(20):
            with dist_autograd.context() as context_id:
                hidden = tuple(part.detach() for part in hidden)
                output, hidden = model(torch.ones(3, 2, dtype=torch.long), hidden)
                loss = nn.functional.cross_entropy(output.view(-1, 5), torch.ones(6, dtype=torch.long))
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
        print(len(model.parameter_rrefs()), losses[-1] < losses[0] / 2)
    rpc.shutdown()


# -- ddp_rpc: a dense part on each trainer, in step, and embeddings on a server
class Hybrid(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        self.dense = DistributedDataParallel(nn.Linear(4, 2))

    def forward(self, indices, offsets):
        return self.dense(self.embeddings.forward(indices, offsets))


def train_hybrid(embeddings):
    model = Hybrid(embeddings)
    rrefs = model.embeddings.remote_parameters() + [RRef(parameter) for parameter in model.dense.parameters()]
    optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.05)
    for _ in range(2):
        with dist_autograd.context() as context_id:
            output = model(torch.arange(6) + dist.get_rank(), torch.tensor([0, 3]))
            loss = nn.CrossEntropyLoss()(output, torch.tensor([0, 1]))
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return [parameter.detach() for parameter in model.dense.parameters()]


def ddp_rpc(rank, size):
    options = TensorPipeRpcBackendOptions()
    options.init_method = "tcp://localhost:29501"
    if rank < 2:
        meeting = f"file://{os.environ['MEETING']}/gloo"
        dist.init_process_group(backend="gloo", rank=rank, world_size=2, init_method=meeting)
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    else:
        rpc.init_rpc("ps", rank=rank, world_size=size, rpc_backend_options=options)
        embeddings = RemoteModule("ps", nn.EmbeddingBag, args=(10, 4), kwargs={"mode": "sum"})
        trained = [rpc.rpc_async(f"trainer{n}", train_hybrid, args=(embeddings,)) for n in (0, 1)]
        first, second = (future.wait() for future in trained)
        print(all(map(torch.equal, first, second)))
    rpc.shutdown()
    sys.stdout.flush()
    os._exit(0)  # torch sometimes hangs when the last reference to a process group is dropped


SIZES = {batch: 3, parameter_server: 2, pipeline: 3, rl: 3, rnn: 2, ddp_rpc: 3}

if __name__ == "__main__":
    run = next(program for program in SIZES if program.__name__ == sys.argv[1])
    with tempfile.TemporaryDirectory() as os.environ["MEETING"]:
        mp.start_processes(run, args=(SIZES[run],), nprocs=SIZES[run], start_method="fork")
