"""A script as torchrun starts it, for GPUs alone: FSDP and tensor parallel, made on "meta", with a DataLoader."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, ROWS = 64, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def main():
    tensor_parallel = int(sys.argv[1])
    assert torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    size = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cuda", (size // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = nn.Sequential(*[Block() for _ in range(3)])
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = TensorDataset(torch.randn(64 * ROWS, WIDTH))
    sampler = DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())
    start = torch.cuda.Event(enable_timing=True)
    for step, (rows,) in enumerate(DataLoader(data, ROWS, sampler=sampler)):
        start.record()
        loss = model(rows.cuda(non_blocking=True)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown, dist.ReduceOp.AVG)
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(step, shown.item(), norm.full_tensor().item(), torch.cuda.max_memory_allocated() / 2**30)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
