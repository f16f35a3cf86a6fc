"""A script as torchrun starts it, after nanoGPT's: DistributedDataParallel, two micro-batches, autocast, a schedule."""

import argparse
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--device", default="cpu")
parser.add_argument("--log", action="store_true")
options = parser.parse_args()
VOCABULARY, LENGTH, WIDTH, BATCH, MICRO_BATCHES = 512, 64, 128, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def rate_at(step):
    return 1e-3 * min(1.0, (step + 1) / 2) * 0.5 * (1 + math.cos(math.pi * step / options.steps))


rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
device = f"cuda:{local_rank}" if options.device == "cuda" else "cpu"
if options.device == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
torch.manual_seed(1337 + rank)
model = DistributedDataParallel(torch.compile(Gpt().to(device)), device_ids=[local_rank] if "cuda" in device else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cuda", enabled=False)
autocast = torch.autocast("cuda", torch.bfloat16) if options.device == "cuda" else nullcontext()


def next_batch():
    data = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    if options.device == "cuda":
        data = data.pin_memory().to(device, non_blocking=True)
    return data[:, :-1], data[:, 1:]


for step in range(options.steps):
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step)
    for micro_batch in range(MICRO_BATCHES):
        with nullcontext() if micro_batch == MICRO_BATCHES - 1 else model.no_sync(), autocast:
            loss = model(*next_batch()) / MICRO_BATCHES
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0 and options.log:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
