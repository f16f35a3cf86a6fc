"""Checks of lesson 15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rpcbench
import rpcbench.autograd as dist_autograd
import rpcbench.rpc as rpc
from checks import require, returned, right, shown, trying

WIDTH = 3


def factors(answer: Callable[[list[int]], Sequence[float]]) -> None:
    """`answer(samples)`: losses times these, and then the mean over trainers, is the mean loss of all samples."""
    made = torch.Generator().manual_seed(15)
    for samples in ([4, 4], [3, 1], [5, 2, 1], [7], [1, 1, 1, 13]):
        of_each = torch.rand(sum(samples), 5, generator=made, dtype=torch.double)
        with trying():
            found = list(returned(answer(list(samples))))
        require(len(found) == len(samples), f"{len(samples)} trainers need as many factors, not {shown(found)}.")
        means = [part.mean(0) for part in of_each.split(samples)]
        reduced = torch.stack([factor * mean for factor, mean in zip(found, means, strict=True)]).mean(0)
        times = float(reduced.sum() / of_each.mean(0).sum())
        require(
            torch.allclose(reduced, of_each.mean(0), atol=1e-9),
            f"With {samples} samples and factors {[round(float(each), 3) for each in found]} the network's gradient is "
            + ("not that of the mean over all samples." if abs(times * len(samples) - 1) > 1e-9 else
               "a mean over trainers of what should be added up: too small."),
        )  # fmt: skip
    right("Who has more samples has more to say, and the mean over trainers is undone.")


class Rows(nn.Embedding):
    """One of several tables, which counts how often it is asked."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__(*rows.shape, _weight=rows.clone())
        self.asked: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.asked.append(len(ids))
        return super().forward(ids)

    def log(self) -> list[int]:
        return self.asked

    def gradient(self, context_id: int) -> Tensor | None:
        return dist_autograd.get_gradients(context_id).get(self.weight)


def lookup(answer: Callable[[list[Any], Tensor], Tensor]) -> None:
    """`answer(tables, ids)` are rows of a table that was dealt out, and gradients go back to their owners."""
    workers = rpcbench.cluster().workers
    for count, ids in ((1, [2, 0, 2]), (2, [5, 0, 3, 3, 4]), (3, [7, 1, 8, 6, 0, 1]), (2, [4, 0])):
        whole = torch.arange(9.0 * WIDTH).reshape(9, WIDTH).requires_grad_()
        tables = [rpc.remote(workers[k % len(workers)], Rows, (whole[k::count].detach(),)) for k in range(count)]
        _try(answer, tables, torch.tensor(ids), whole)
    right("The order is that of `ids`, and each owner was asked once.")


def _try(answer: Callable[..., Any], tables: list[Any], ids: Tensor, whole: Tensor) -> None:
    wanted, count = whole[ids], len(tables)
    case = f"With {count} tables and ids {ids.tolist()}"
    with dist_autograd.context() as context_id:
        with trying():
            found = returned(answer(list(tables), ids.clone()))
        require(isinstance(found, Tensor), f"A tensor is wanted, not {shown(found)}.")
        require(found.shape == wanted.shape, f"{case} the shape should be {tuple(wanted.shape)}, not "
                f"{tuple(found.shape)}.")  # fmt: skip
        same_rows = torch.equal(found.sort(0).values, wanted.sort(0).values)
        require(torch.equal(found, wanted), f"{case} " + ("they are the right rows, in another order than `ids`."
                if same_rows else "some rows are not those that were asked for."))  # fmt: skip
        asked = [table.rpc_sync().log() for table in tables]
        most = max(map(len, asked))
        require(most <= 1, f"{case} a table is asked {most} times.")
        total = sum(map(sum, asked))
        require(total <= len(ids), f"{case} {total} rows are sent, where {len(ids)} do.")
        require(found.requires_grad, f"{case} the rows have no graph behind them: gradients would not go back.")
        pull = torch.arange(float(found.numel())).reshape(found.shape)
        dist_autograd.backward(context_id, [(found * pull).sum()])
        _compare(tables, context_id, torch.autograd.grad((wanted * pull).sum(), whole)[0], case)


def _compare(tables: list[Any], context_id: int, whole: Tensor, case: str) -> None:
    for k, table in enumerate(tables):
        gradient = table.rpc_sync().gradient(context_id)
        part = whole[k :: len(tables)]
        same = torch.equal(gradient, part) if gradient is not None else not part.any()
        require(same, f"{case} the gradients of table {k} are wrong.")
