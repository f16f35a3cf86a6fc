"""A program for torch.distributed.rpc in the style of its users, without any reference to rpcbench."""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions, rpc_async


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.weight * x

    def parameter_rrefs(self):
        return [RRef(p) for p in self.parameters()]


def run(rank, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    options = TensorPipeRpcBackendOptions(num_worker_threads=4)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        layer = rpc.remote("worker1", Layer)
        optimizer = DistributedOptimizer(optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.5)
        with dist_autograd.context() as context_id:
            loss = layer.rpc_sync().forward(torch.ones(2)).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        futures = [rpc_async("worker1", torch.add, args=(torch.ones(1), n)) for n in range(2)]
        added = [f.item() for f in torch.futures.wait_all(futures)]
        remote = RemoteModule("worker1/cpu", torch.nn.Identity)
        print(layer.to_here().weight.tolist(), added, remote.forward(torch.ones(1)).item())
        print(rpc.init_rpc.__module__.split(".")[0], *sys.argv[1:])
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
