"""Checks of lesson 15."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from checks import exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

WIDTH = 3
Lookup = Callable[[list[Any], Tensor], Tensor]


@exercise(
    "Write the mean over all samples as a sum over trainers. Which share has each trainer's own mean in it?",
    "A trainer's share is its number of samples over the number of all. What does the mean over trainers do to that?",
)
def factors(answer: Callable[[list[int]], Sequence[float]]) -> None:
    """`answer(samples)`: losses times these, and then the mean over trainers, is the mean loss of all samples."""
    made = torch.Generator().manual_seed(15)
    for samples in ([4, 4], [3, 1], [5, 2, 1], [7], [1, 1, 1, 13], [1, 2]):
        of_each = torch.rand(sum(samples), 5, generator=made, dtype=torch.double)
        given = list(samples)
        with trying():
            found = returned(answer(given))
        require(given == samples, "It changes the list of samples that it was given.")
        found = read(found, [float], "The answer should be a list of numbers")
        require(len(found) == len(samples), f"{len(samples)} trainers need as many factors, not {shown(found)}.")
        means = [part.mean(0) for part in of_each.split(samples)]
        with trying("A factor times a gradient"):
            reduced = torch.stack([factor * mean for factor, mean in zip(found, means, strict=True)]).mean(0)
        times = float(reduced.sum() / of_each.mean(0).sum())
        require(
            torch.allclose(reduced, of_each.mean(0), atol=1e-9),
            f"With {samples} samples and factors {[round(float(each), 3) for each in found]} the network's gradient is "
            + ("not that of the mean over all samples." if abs(times * len(samples) - 1) > 1e-9 else
               "a mean over trainers of what should be added up: too small."),
        )  # fmt: skip
    right("Who has more samples has more to say, and the mean over trainers is undone.")


class Table:
    """Stands in for an RRef of an `nn.Embedding`: it logs when it is asked and when its answer is waited for."""

    def __init__(self, number: int, rows: Tensor, log: list[tuple[str, int, int]]) -> None:
        self.number, self._rows, self._log = number, rows, log

    def rpc_async(self, timeout: float = 0) -> _Calls:
        return _Calls(self, sync=False)

    def rpc_sync(self, timeout: float = 0) -> _Calls:
        return _Calls(self, sync=True)

    def ask(self, ids: Tensor) -> Tensor:
        require(isinstance(ids, Tensor) and not ids.dtype.is_floating_point and ids.dtype != torch.bool,
                f"A table is asked with a tensor of row numbers, not {shown(ids)}.")  # fmt: skip
        self._log.append(("asked", self.number, ids.numel()))
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._rows):
            raise IndexError(f"table {self.number} has {len(self._rows)} rows, and was asked for {ids.tolist()}")
        return self._rows[ids.long()]

    def wait(self) -> None:
        self._log.append(("waited for", self.number, 0))


class _Calls:
    def __init__(self, table: Table, sync: bool) -> None:
        self._table, self._sync = table, sync

    def forward(self, ids: Tensor) -> Any:
        rows = self._table.ask(ids)
        coming = _Coming(self._table, rows)
        return coming.wait() if self._sync else coming

    __call__ = forward


class _Coming:
    def __init__(self, table: Table, rows: Tensor) -> None:
        self._table, self._rows = table, rows

    def wait(self) -> Tensor:
        self._table.wait()
        return self._rows


@exercise(
    "For each table, which places of `ids` have rows that lie there? In which order do the rows come then?",
    "`places = [(ids % n == k).nonzero().flatten() for k in range(n)]` are the places of each table; begin a call for "
    "each, join what comes, and put it back into order by `torch.cat(places).argsort()`.",
)
def lookup(answer: Lookup) -> None:
    """`answer(tables, ids)` are rows of a table that was dealt out, and gradients go back to their owners."""
    for count, ids in (
        (1, [2, 0, 2]),
        (2, [5, 0, 3, 3, 4]),
        (3, [7, 1, 8, 6, 0, 1]),
        (2, [4, 0]),
        (4, [3, 2, 1, 0, 8]),
    ):
        _try(answer, count, ids, len(ids))
    _try(answer, 2, [1, 4, 1, 6], 4, torch.double, 2)
    right("The order is that of `ids`, and all owners worked at once.")


@exercise(
    "Look up the different rows first. Which of them belongs at which place of the result?",
    "Begin with `different, where = ids.unique(return_inverse=True)`, and end with `[where]`.",
)
def lookup_once(answer: Lookup) -> None:
    """`answer(tables, ids)` as of `lookup`, and each different row is sent once."""
    for count, ids in (
        (1, [2, 0, 2]),
        (2, [5, 5, 3, 3, 4, 5]),
        (3, [7, 1, 8, 8, 8, 1, 0]),
        (2, [4, 4]),
        (3, [0, 1, 2]),
    ):
        _try(answer, count, ids, len(set(ids)))
    _try(answer, 2, [1, 4, 1, 6], 3, torch.double, 2)
    right("The more a row is read, the more that saves; and its gradients are added up before they travel.")


def _try(
    answer: Lookup, count: int, numbers: list[int], most: int, dtype: torch.dtype = torch.float32, width: int = WIDTH
) -> None:
    whole = torch.arange(9 * width, dtype=dtype).reshape(9, width).requires_grad_()
    log: list[tuple[str, int, int]] = []
    tables = [Table(k, whole[k::count], log) for k in range(count)]
    ids, given = torch.tensor(numbers), torch.tensor(numbers)
    wanted = whole[ids]
    kind = str(dtype).removeprefix("torch.")
    other = f" of {kind} with {width} numbers in a row" if dtype != torch.float32 else ""
    case = f"With {count} table{'s' if count > 1 else ''}{other} and ids {numbers}"
    with trying(f"{case} it" if other else "It"):
        found = returned(answer(list(tables), given))
    require(isinstance(found, Tensor), f"A tensor is wanted, not {shown(found)}.")
    require(torch.equal(ids, given), f"{case} the ids have changed.")
    require(found.shape == wanted.shape, f"{case} the shape should be {tuple(wanted.shape)}, not {tuple(found.shape)}.")
    require(found.dtype == dtype, f"{case} the rows are of {str(found.dtype).removeprefix('torch.')}, not {kind}.")
    require(torch.equal(found, wanted), f"{case} {_wrong_rows(found, wanted, whole)}.")
    _look(case, log, count, most)
    require(found.requires_grad, f"{case} the rows have no graph behind them: gradients would not go back.")
    pull = torch.arange(1.0, found.numel() + 1).reshape(found.shape)
    (gradient,) = torch.autograd.grad((found * pull).sum(), whole)
    (right_one,) = torch.autograd.grad((wanted * pull).sum(), whole)
    require(torch.equal(gradient, right_one), f"{case} the gradients of the tables are wrong.")


def _wrong_rows(found: Tensor, wanted: Tensor, whole: Tensor) -> str:
    """Which rows are wrong: all of them in another order, or one that belongs to another id."""
    if torch.equal(found.sort(0).values, wanted.sort(0).values):
        return "they are the right rows, in another order than `ids`"
    place = next(i for i, (mine, its) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(mine, its))
    of = [number for number, row in enumerate(whole) if torch.equal(row, found[place])]
    others = f": row {place} is that of id {of[0]}. Rows come table by table, and `ids` has another order" if of else ""
    return f"some rows are not those that were asked for{others}"


def _look(case: str, log: list[tuple[str, int, int]], count: int, most: int) -> None:
    """How often each table was asked, for how many rows, and whether all were asked before the first wait."""
    asked = [number for what, number, _ in log if what == "asked"]
    often = max(asked.count(number) for number in range(count))
    require(often <= 1, f"{case} a table is asked {often} times.")
    total = sum(rows for what, _, rows in log if what == "asked")
    require(total <= most, f"{case} {total} rows are sent, where {most} will do.")
    first = next((place for place, (what, _, _) in enumerate(log) if what == "waited for"), len(log))
    for what, number, _ in log[first:]:
        early = log[first][1]
        require(what != "asked", f"{case} table {early} is waited for before table {number} is asked: they work one "
                "after the other.")  # fmt: skip
