"""`rpcbench demo`: a classifier of scikit-learn's digits, trained as a pipeline of two stages on two workers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from tqdm.auto import tqdm

from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import Pipeline, StepResult, split

BATCH = 128  # samples per step
HIDDEN = 512  # width of the hidden layers
EPOCHS = 20


@dataclass(frozen=True, slots=True)
class Figures:
    """The results that `--json` writes."""

    accuracy: float  # on the test set, 0 to 1
    seconds: float  # of training and test, without set-up
    idle: float  # idle share of the workers, 0 to 1: the mean over all steps
    samples_per_second: float


def digit_tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return images (n, 64), scaled to 0…1, and labels (n,) for training (1437 samples) and for test (360 samples)."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels)
    x, x_test, y, y_test = (torch.tensor(part) for part in parts)
    return x.float(), y.long(), x_test.float(), y_test.long()


def make_classifier() -> nn.Sequential:
    """Make a classifier of 64 pixels into 10 classes, with four linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10),
    )  # fmt: skip


def _batch_indices(samples: int, order: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return the indices of one epoch in batches of BATCH, without the rest that does not fill one."""
    return torch.randperm(samples, generator=order)[: samples - samples % BATCH].chunk(samples // BATCH)


def run_demo(json_file: Path | None = None, epochs: int | None = None) -> Figures:
    """Train, print the results, and return them (`json_file` receives them, too)."""
    console = Console()
    console.print("Starting two workers …")
    with Cluster(2) as cluster, _one_thread():
        figures, last = train_classifier(cluster, epochs or EPOCHS)
    console.print(f"\n[bold]Test accuracy {figures.accuracy:.1%}[/bold] after {figures.seconds:.1f} s of training.\n")
    console.print("One step, 8 micro-batches on two workers:\n")
    print(last.timeline.text(min(console.width, 110)))
    console.print("\nThe same in a notebook, with live panels, and lessons:  rpcbench lab")
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    return figures


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread of torch in this process meanwhile."""
    # This process only drives: more threads of torch's would take cores from the workers.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_classifier(cluster: Cluster, epochs: int) -> tuple[Figures, StepResult]:
    """Train on a cluster's workers; return the figures and the result of the last step."""
    x, y, x_test, y_test = digit_tensors()
    stages = split(make_classifier(), workers=cluster.workers, balance="params")
    optimizer = (torch.optim.Adam, {"lr": 1e-3})
    pipe = Pipeline(stages, schedule="1f1b", microbatches=8, loss_fn=functional.cross_entropy, optimizer=optimizer)
    steps = epochs * (len(x) // BATCH)
    order = torch.Generator().manual_seed(0)
    begin, idle, score = time.perf_counter(), 0.0, 0.0
    with tqdm(total=steps, unit="step") as bar:
        for _ in range(epochs):
            for batch in _batch_indices(len(x), order):
                result = pipe.step(x[batch], y[batch])
                idle += result.idle
                bar.update()
                rate = bar.n * BATCH / (time.perf_counter() - begin)
                bar.set_postfix_str(
                    f"loss {result.loss:.3f}, accuracy {score:.1%}, {rate:.0f} samples/s, idle {idle / bar.n:.0%}"
                )
            score = float((pipe.predict(x_test).argmax(1) == y_test).double().mean())
    seconds = time.perf_counter() - begin
    return Figures(score, seconds, idle / steps, steps * BATCH / seconds), result
