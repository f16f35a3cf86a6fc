"""A training job for torchrun that goes on from its newest checkpoint, with as many ranks as there are: for lesson 33.

torchrun --standalone --nproc-per-node 4 restart_job.py --folder FOLDER --dies 2 13

The training is that of the lesson: the same model, batches and checkpoints, by torch alone. `--dies RANK STEP` ends a
rank as the kernel ends a process that takes too much memory. Rank 0 appends a line to `losses` for each step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from recipes import fsdp, rows_here
from tiny_transformer import batch, loss_of, make_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

ROWS, STEPS, EVERY = 24, 20, 5


class Job:
    """What the ranks train; each has a piece of it."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = fsdp(make_model().double(), self.mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)

    def step(self, number: int) -> float:
        """Train a step; the loss of the whole batch."""
        inputs, targets = batch(number, ROWS)
        self.optimizer.zero_grad()
        loss = loss_of(self.model(rows_here(inputs, self.mesh)), rows_here(targets, self.mesh))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def state(self, step: int) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "scheduler": self.scheduler.state_dict(), "step": step}

    def save(self, folder: Path, step: int) -> None:
        """A draft first, which gets its name when all ranks have written."""
        draft = folder / "draft"
        if dist.get_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
        dist.barrier()
        dcp.save(self.state(step), checkpoint_id=draft)
        dist.barrier()
        if dist.get_rank() == 0:
            draft.rename(folder / f"step-{step}")
        dist.barrier()

    def load_newest(self, folder: Path) -> int:
        """Load the newest complete checkpoint, if there is one. Returns the step to go on with."""
        found = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        if not found:
            return 0
        state = self.state(0)
        dcp.load(state, checkpoint_id=found[-1])
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        step: int = state["step"]
        return step


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--dies", type=int, nargs=2, default=(-1, -1))
    given = options.parse_args()
    dist.init_process_group("gloo")
    rank, job = dist.get_rank(), Job()
    for step in range(job.load_newest(given.folder), STEPS):
        if (rank, step) == tuple(given.dies):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = job.step(step)
        if rank == 0:
            with (given.folder / "losses").open("a") as file:
                file.write(json.dumps([step, dist.get_world_size(), loss]) + "\n")
        if (step + 1) % EVERY == 0:
            job.save(given.folder, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
