"""A training job that knows nothing of rpcbench, for lesson 38. Find out what is wrong with it before you read on here.

torchrun --nproc-per-node 4 others_job.py --port 25999
"""

from __future__ import annotations

import argparse
import queue
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.debug import start_debug_server
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, STEPS = 256, 64, 6


def load_batch(chance: torch.Generator, batches: queue.Queue[Tensor] | None) -> Tensor:
    """The next batch; of a queue, where another process would fill it."""
    return torch.randn(ROWS, WIDTH, generator=chance) if batches is None else batches.get()


def augment(batch: Tensor, seconds: float) -> Tensor:
    """Turn each row. In Python, so torch sees nothing of it."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return batch.flip(1)


def whiten(batch: Tensor, times: int) -> Tensor:
    """Give the columns one variance."""
    for _ in range(times):
        batch = batch @ torch.linalg.qr(batch.T @ batch).Q
    return batch


def save_checkpoint(model: nn.Module, lock: Path) -> None:
    """Save the model, once nobody else does."""
    while lock.exists():
        time.sleep(0.1)
    torch.save(model.state_dict(), lock.with_suffix(".pt"))


def evaluate(model: nn.Module, batch: Tensor) -> int:
    """Count the steps until the loss is small."""
    steps = 0
    with torch.no_grad():
        while model(batch).square().mean() > 0:
            steps += 1
    return steps


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, default=0)  # of torch's debug server
    options.add_argument("--folder", type=Path, default=Path())  # for traces
    options.add_argument("--fault", default="")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    dist.init_process_group("gloo")
    if given.port:
        start_debug_server(port=given.port)
    fault = choose_fault(given.fault, given.seed, dist.get_world_size(), dist.get_rank())
    train(given.folder, fault, is_traced=given.fault == "slow")
    dist.destroy_process_group()


def choose_fault(kind: str, seed: int, size: int, rank: int) -> str:
    """The fault of this rank: one rank has one, and the others none."""
    chance = random.Random(f"{kind} {seed}")
    faults = {"hang": ["load", "save", "evaluate"], "slow": ["augment", "whiten"], "": [""]}[kind]
    return chance.choice(faults) if rank == chance.randrange(size) else ""


def train(folder: Path, fault: str, is_traced: bool) -> None:
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(dist.get_rank())
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = torch.profiler.profile(record_shapes=True) if is_traced else None
    for step in range(STEPS):
        if recorded is not None and step == 2:  # the first steps are not like the others
            recorded.start()
        if step == 3:
            hang(fault, model, chance, folder)
        batch = load_batch(chance, None)
        if fault == "augment":
            batch = augment(batch, 0.1)
        if fault == "whiten":
            batch = whiten(batch, 40)
        loss = F.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if recorded is not None:
        recorded.stop()
        recorded.export_chrome_trace(str(folder / f"trace_rank{dist.get_rank()}.json.gz"))


def hang(fault: str, model: nn.Module, chance: torch.Generator, folder: Path) -> None:
    if fault in ("load", "save", "evaluate"):
        (folder / "stuck").touch()  # the lesson waits for that; nothing else does
    if fault == "load":
        load_batch(chance, queue.Queue())
    if fault == "save":
        (folder / "lock").touch()
        save_checkpoint(model.module, folder / "lock")
    if fault == "evaluate":
        evaluate(model.module, torch.randn(ROWS, WIDTH, generator=chance))


if __name__ == "__main__":
    main()
