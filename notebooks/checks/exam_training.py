"""Checks of questions 5 to 11 of the exam: costs, sharded states and tables, idle time, recomputation, experts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from checks import differ, dots_left, read, require, returned, right, shown, trying
from checks.exam_parts import Link, Tensor, all_to_all, close, numbers, question, same
from checks.ranks import Ranks
from rpcbench.base.errors import count_noun


# -- 5
@question
def two_level(answer: Callable[[float, int, int, Link, Link], float]) -> None:
    """`answer(n, nodes, per_node, fast, slow)` is the time of an all-reduce on two levels."""
    fast, slow = (1.0, 100.0), (5.0, 10.0)
    for n, nodes, per_node, inside, outside in (
        (800, 1, 4, fast, slow),
        (800, 1, 2, fast, slow),
        (800, 2, 1, fast, slow),
        (900, 3, 1, fast, slow),
        (800, 2, 4, fast, slow),
        (6000, 5, 3, (0.5, 50.0), (2.0, 4.0)),
        (1e9, 16, 8, (1e-5, 3e11), (2e-5, 2.5e10)),
        (640, 1, 1, fast, slow),
    ):
        within = 2 * (per_node - 1) * (inside[0] + n / per_node / inside[1])
        between = 2 * (nodes - 1) * (outside[0] + n / per_node / nodes / outside[1])
        with trying():
            found: Any = returned(answer(n, nodes, per_node, inside, outside))
        asked = f"two_level({n:g}, {nodes}, {per_node}, {inside}, {outside})"
        found = read(found, float, f"{asked}: a number is wanted")
        wanted, told = within + between, f": {within:g} within the nodes and {between:g} between them; you say "
        require(
            abs(found - wanted) <= 1e-6 * wanted,
            f"{asked} is {differ(wanted, found, told, 6)}.",
        )
    right("Only one part in `per_node` of the bytes of a rank goes over the slow links.")


# -- 6
@question
def zero1_step(answer: Callable[..., None]) -> None:
    """`answer(whole, gradient, velocity, lr, momentum, rank, size, reduce_scatter, all_gather)` steps in place."""
    lr, momentum, steps = 0.5, 0.75, 3
    for size, length in ((2, 4), (3, 6), (2, 5), (3, 7), (4, 3), (1, 3), (4, 6)):
        asked = f"{count_noun(size, 'rank')}, {length} parameters"
        each = -(-length // size)
        start = torch.arange(1.0, length + 1)
        wholes = [start.clone() for _ in range(size)]
        velocities = [torch.zeros(each) for _ in range(size)]
        reference = start.clone().requires_grad_()
        optimizer = torch.optim.SGD([reference], lr=lr, momentum=momentum)
        state = torch.zeros(each * size)
        for step in range(steps):
            gradients = [
                (torch.arange(length) * (rank + 2) % 5 + rank + step + 1.0) * (-1) ** step for rank in range(size)
            ]
            before = [gradient.clone() for gradient in gradients]
            reference.grad = torch.stack(before).mean(0)
            optimizer.step()
            state[:length] = optimizer.state[reference]["momentum_buffer"]
            ranks = Ranks(size)

            def part(
                rank: int, ranks: Ranks = ranks, gradients: list[Tensor] = gradients, wholes: list[Tensor] = wholes,
                velocities: list[Tensor] = velocities, size: int = size,
            ) -> object:  # fmt: skip
                return answer(
                    wholes[rank], gradients[rank], velocities[rank], lr, momentum, rank, size,
                    ranks.reduce_scatter(rank), ranks.all_gather(rank),
                )  # fmt: skip

            ranks.run(part)
            told = f"{asked}, step {step + 1}"
            for rank in range(size):
                require(
                    ranks.calls[rank] or not torch.equal(wholes[rank], start),
                    f"The parameters are as they were.{dots_left()}",
                )
                for call, count in ranks.calls[rank]:
                    require(
                        call != "all_gather" or count == each,
                        f"{told}: rank {rank} gives all_gather {count} numbers; a shard has {each}.",
                    )
                require(torch.equal(gradients[rank], before[rank]), f"{told}: `gradient` of rank {rank} has changed.")
                shard = state[rank * each : (rank + 1) * each]
                require(
                    wholes[rank].shape == start.shape and velocities[rank].shape == shard.shape,
                    f"{told}: `whole` or `velocity` of rank {rank} has another length.",
                )
                require(
                    close(velocities[rank], shard),
                    f"{told}: `velocity` of rank {rank} is {numbers(velocities[rank])}; it should be {numbers(shard)}.",
                )
                require(
                    close(wholes[rank], reference.detach()),
                    f"{told}: `whole` of rank {rank} is {numbers(wholes[rank])}; it should be "
                    f"{numbers(reference.detach())}.",
                )
                called = [call for call, _ in ranks.calls[rank]]
                require(
                    sorted(called) == ["all_gather", "reduce_scatter"],
                    f"{told}: right, but rank {rank} calls {', '.join(called)}; each once is enough.",
                )
    right("Each rank keeps one part of the velocities, and the step is that of torch's SGD.")


# -- 7
@question
def embed(answer: Callable[[Tensor, Tensor, int, Callable[[Tensor], None]], Tensor]) -> None:
    """`answer(ids, piece, first, all_reduce)` is the rows of the whole table."""
    tables = ((4, 4), (2, 4, 1), (3, 1, 5, 3), (4,), (1, 1, 1), (3, 2))
    shapes: tuple[tuple[int, ...], ...] = ((6,), (2, 5), (12,), (4,), (3, 1, 2), (1,))  # in the last one rank has all
    for lengths, shape in zip(tables, shapes, strict=True):
        size, words = len(lengths), sum(lengths)
        table = torch.stack([torch.tensor([word + 1.0, 100.0 * (word + 1)]) for word in range(words)])
        if len(shape) == 3:
            table = torch.cat([table, -table[:, :1]], 1).double()  # three numbers in a row, of another type
        pieces = [piece.clone() for piece in table.split(lengths)]
        firsts = [sum(map(len, pieces[:rank])) for rank in range(size)]
        count = torch.Size(shape).numel()
        ids = (torch.arange(count) * 5 + words - 1).remainder(words).reshape(shape)
        each = [ids.clone() for _ in range(size)]
        before = [piece.clone() for piece in pieces]
        ranks = Ranks(size)
        found = ranks.run(
            lambda rank, each=each, pieces=pieces, firsts=firsts, ranks=ranks: returned(
                answer(each[rank], pieces[rank], firsts[rank], ranks.all_reduce(rank))
            )
        )
        asked = f"A table of {words} rows on {count_noun(size, 'rank')}, ids {shown(ids.tolist())}"
        wanted = table[ids]
        for rank, rows in enumerate(found):
            told = f"{asked}: rank {rank} returns"
            require(isinstance(rows, Tensor), f"{told} {shown(rows)}; a tensor is wanted.")
            require(torch.equal(pieces[rank], before[rank]), f"{asked}: the piece of rank {rank} has changed.")
            require(torch.equal(each[rank], ids), f"{asked}: `ids` of rank {rank} has changed.")
            require(
                rows.shape == wanted.shape,
                f"{told} a tensor of shape {tuple(rows.shape)}; {tuple(wanted.shape)} is wanted.",
            )
            require(rows.dtype == table.dtype, f"{told} a tensor of {rows.dtype}; the table is of {table.dtype}.")
            require(close(rows, wanted), f"{told} {numbers(rows)}; the rows are {numbers(wanted)}.")
        require(max(ranks.messages) <= 1, f"{asked}: right, but with {max(ranks.messages)} all-reduces; one is enough.")
        require(min(ranks.messages) == 1, f"{asked}: right, but a rank makes no all-reduce; one is wanted.")
    right("Where a rank has no row it adds zeros, and the sum over the ranks is the row.")


# -- 8
@question
def idle(answer: Callable[[list[list[float]]], list[float]]) -> None:
    """`answer(times)` is how long each stage is idle until the last forward ends."""
    for times in (
        [[1, 1], [2, 2]],
        [[2, 2], [1, 1]],
        [[3, 4, 5]],
        [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
        [[1, 5, 1, 1], [2, 1, 4, 1], [1, 1, 1, 6]],
        [[4, 1, 1], [1, 1, 1], [1, 6, 1], [2, 1, 3]],
        [[2], [3], [4]],
        [[6, 1, 1, 1, 1], [1, 1, 1, 1, 4]],
        [[1, 1, 5], [5, 1, 1]],
        [[0.5, 1.25], [2, 0.25]],
    ):
        ends = [0.0] * len(times)
        for number in range(len(times[0])):
            for stage, row in enumerate(times):
                ends[stage] = max(ends[stage], ends[stage - 1] if stage else 0.0) + row[number]
        wanted = [ends[-1] - sum(row) for row in times]
        given: Any = [list(row) for row in times]
        with trying():
            found: Any = returned(answer(given))
        asked = f"idle({times})"
        require(given == times, f"{asked} changes `times`.")
        told = f"{asked}: a list with a number for each of {len(times)} stages is wanted"
        found = read(found, (float,) * len(times), told)
        require(
            all(abs(one - other) < 1e-6 for one, other in zip(found, wanted, strict=True)),
            f"{asked}: the last forward ends at {ends[-1]:g}, and the stages are idle for "
            f"{differ(wanted, found, '; you say ')}.",
        )
    right("A stage waits for the stage before it, and for itself.")


# -- 9
class Held:
    """A tensor that a graph keeps for backward."""

    def __init__(self, layer: int, tensor: Tensor) -> None:
        self.layer, self.tensor = layer, tensor


class Chain:
    """Layers that count their runs, the graphs that are held, and the outputs of the first pass that are kept."""

    def __init__(self, count: int) -> None:
        self.held: weakref.WeakSet[Held] = weakref.WeakSet()
        self.outputs: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = self.kept = 0
        self.runs = [0] * count
        self.weights = [
            torch.tensor([[0.5, -1.0], [1.5, 0.25 * number]], dtype=torch.float64, requires_grad=True)
            for number in range(count)
        ]

    def layer(self, number: int) -> Callable[[Tensor], Tensor]:
        def pack(tensor: Tensor) -> Held:
            held = Held(number, tensor.detach())
            self.held.add(held)
            self.most = max(self.most, len({each.layer for each in self.held}))
            return held

        def run(x: Tensor) -> Tensor:
            require(isinstance(x, Tensor), f"Layer {number} is given {shown(x)}, not a tensor.")
            self.runs[number] += 1
            if torch.is_grad_enabled():
                self.kept = max(self.kept, len(self.outputs))
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
                y = torch.tanh(x @ self.weights[number])
            if not torch.is_grad_enabled():
                self.outputs.add(y)
            return y

        return run


@question
def recompute(answer: Callable[[list[Callable[[Tensor], Tensor]], Tensor, Tensor, int], Tensor]) -> None:
    """`answer(layers, x, gradient, every)` is the gradient of `x`; no more than `every` layers are held."""
    for count, every in ((4, 2), (5, 2), (3, 1), (7, 3), (3, 5), (6, 6), (12, 3)):
        asked = f"{count} layers, {every} in a segment"
        chain, plain = Chain(count), Chain(count)
        x = torch.tensor([[0.3, -0.7], [0.1, 0.9], [0.5, 0.2]], dtype=torch.float64)
        gradient = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.25, 3.0]], dtype=torch.float64)
        before, given = x.clone(), gradient.clone()
        leaf = y = x.clone().requires_grad_()
        for number in range(count):
            y = plain.layer(number)(y)
        y.backward(gradient)
        del y
        layers = [chain.layer(number) for number in range(count)]
        same_layers = list(layers)
        with trying():
            found: Any = returned(answer(layers, x, gradient, every))
        require(layers == same_layers, f"{asked}: the list `layers` itself has changed; it has {len(layers)} now.")
        require(
            torch.equal(x, before) and not x.requires_grad and x.grad is None,
            f"{asked}: `x` itself has changed; it needed no gradient, and has none.",
        )
        require(torch.equal(gradient, given), f"{asked}: `gradient` itself has changed.")
        for number, runs in enumerate(chain.runs):
            require(runs <= 2, f"{asked}: layer {number} runs {runs} times; twice is enough.")
            require(runs, f"{asked}: layer {number} does not run.")
        require(
            chain.most <= min(every, count),
            f"{asked}: the graphs of {chain.most} layers are held at once; {every} are allowed.",
        )
        most = -(-count // every)
        require(
            chain.kept <= most + 1,
            f"{asked}: {chain.kept} outputs of layers are kept until backward; the inputs of "
            f"{count_noun(most, 'segment')} are enough.",
        )
        require(
            isinstance(found, Tensor) and found.shape == x.shape,
            f"{asked}: you return {shown(found)}; a tensor in the shape of `x` is wanted.",
        )
        require(
            leaf.grad is not None and torch.allclose(found, leaf.grad),
            f"{asked}: the gradient of `x` is {numbers(leaf.grad)}; yours is {numbers(found)}.",
        )
        for number, (mine, wanted) in enumerate(zip(chain.weights, plain.weights, strict=True)):
            require(mine.grad is not None, f"{asked}: the weight of layer {number} has no gradient.")
            require(
                torch.allclose(mine.grad, wanted.grad),
                f"{asked}: the gradient of the weight of layer {number} is {numbers(wanted.grad)}; yours is "
                f"{numbers(mine.grad)}.",
            )
    right("Each layer ran twice at most, and only one segment was held at any time.")


# -- 10
@question
def experts(answer: Callable[..., Tensor]) -> None:
    """`answer(tokens, chosen, expert, size, all_to_all)` is the answers, in the order of the tokens."""
    for all_chosen in (
        ([0, 1, 0], [1, 0, 1]),
        ([1, 0, 0, 1], [0, 0]),
        ([2, 0, 1, 0], [1, 1, 2], [0, 2, 2, 2, 1]),
        ([1, 0, 1], [0, 0], [0, 1, 0]),
        ([], [1, 0, 1]),
        ([0, 0, 0],),
        ([3, 1, 3, 2], [0, 3], [], [2, 2, 0]),
    ):
        size = len(all_chosen)
        width, kind = (3, torch.float64) if size == 4 else (2, torch.float32)
        asked = f"Tokens that choose {[list(row) for row in all_chosen]}"
        ranks = Ranks(size)
        calls = [0] * size
        given = [
            torch.tensor(
                [[1000.0 * rank + 10 * place + 1, other, 7.0][:width] for place, other in enumerate(row)], dtype=kind
            ).reshape(-1, width)
            for rank, row in enumerate(all_chosen)
        ]
        before = [tokens.clone() for tokens in given]
        chosen = [torch.tensor(row, dtype=torch.long) for row in all_chosen]

        def expert_of(
            rank: int, calls: list[int] = calls, asked: str = asked, width: int = width
        ) -> Callable[[Tensor], Tensor]:
            def expert(rows: Tensor) -> Tensor:
                require(
                    isinstance(rows, Tensor) and rows.dim() == 2 and rows.shape[1] == width,
                    f"{asked}: the expert of rank {rank} is given {shown(rows)}; rows of tokens are wanted.",
                )
                strange = [row for row in rows.tolist() if row[1] != rank]
                require(
                    not strange,
                    f"{asked}: the expert of rank {rank} is given a token that chose "
                    f"{f'expert {strange[0][1]:g}' if strange else ''}.",
                )
                calls[rank] += 1
                return rows * (rank + 2) + 0.5

            return expert

        found = ranks.run(
            lambda rank, given=given, chosen=chosen, size=size, ranks=ranks, expert_of=expert_of: returned(
                answer(given[rank], chosen[rank], expert_of(rank), size, all_to_all(ranks, rank))
            )
        )
        for rank, answers in enumerate(found):
            told = f"{asked}: rank {rank} returns"
            wanted = before[rank] * (torch.tensor(all_chosen[rank], dtype=torch.long) + 2).unsqueeze(1) + 0.5
            require(isinstance(answers, Tensor), f"{told} {shown(answers)}; a tensor is wanted.")
            require(
                answers.shape == wanted.shape,
                f"{told} a tensor of shape {tuple(answers.shape)}; it has {len(wanted)} tokens of {width} numbers.",
            )
            require(answers.dtype == kind, f"{told} a tensor of {answers.dtype}; its tokens are of {kind}.")
            require(
                close(answers, wanted), f"{told} {numbers(answers)}; the answers to its tokens are {numbers(wanted)}."
            )
            require(torch.equal(given[rank], before[rank]), f"{asked}: `tokens` of rank {rank} have changed.")
            require(chosen[rank].tolist() == all_chosen[rank], f"{asked}: `chosen` of rank {rank} has changed.")
            require(
                calls[rank] <= 1,
                f"{asked}: right, but the expert of rank {rank} is called {calls[rank]} times; once is enough.",
            )
            require(calls[rank], f"{asked}: right, but the expert of rank {rank} is not called; once is wanted.")
        require(
            max(ranks.messages) <= 2, f"{asked}: right, but with {max(ranks.messages)} all-to-alls; two are enough."
        )
        fewest = min(ranks.messages)
        require(fewest == 2, f"{asked}: right, but with {count_noun(fewest, 'all-to-all')} on a rank; two are wanted.")
    right("There and back: two all-to-alls, and every answer is in the place of its token.")


# -- more collectives of the ranks
# -- 11
@question
def normalize(answer: Callable[[Tensor, Tensor, Callable[[Tensor], None]], Tensor]) -> None:
    """`answer(x, weight, all_reduce)` is this rank's columns of the rows, normalized as one process does."""
    widths = ((3, 3), (4, 2), (2, 1, 5), (6,), (3, 0), (1, 1, 1, 1), (5, 1))
    counts = (2, 3, 1, 4, 2, 5, 1)
    for lengths, rows in zip(widths, counts, strict=True):
        size, columns = len(lengths), sum(lengths)
        whole = torch.arange(1.0, rows * columns + 1).reshape(rows, columns).remainder(7) - 2.5
        scale = torch.arange(1.0, columns + 1)
        if rows == 4:
            whole, scale = whole.double(), scale.double()
        wanted = (whole / whole.square().mean(-1, keepdim=True).sqrt() * scale).split(lengths, -1)
        before = [part.clone() for part in whole.split(lengths, -1)], [part.clone() for part in scale.split(lengths)]
        xs, weights = ([part.clone() for part in parts] for parts in before)
        ranks = Ranks(size)
        found = ranks.run(
            lambda rank, xs=xs, weights=weights, ranks=ranks: returned(
                answer(xs[rank], weights[rank], ranks.all_reduce(rank))
            )
        )
        asked = f"{count_noun(rows, 'row')} of {columns} numbers, of which the ranks have {shown(list(lengths))}"
        for rank, part in enumerate(found):
            told = f"{asked}: rank {rank} returns"
            require(isinstance(part, Tensor), f"{told} {shown(part)}; a tensor is wanted.")
            require(same(xs[rank], before[0][rank]), f"{asked}: `x` of rank {rank} has changed.")
            require(same(weights[rank], before[1][rank]), f"{asked}: `weight` of rank {rank} has changed.")
            require(
                part.shape == wanted[rank].shape,
                f"{told} a tensor of shape {tuple(part.shape)}; {tuple(wanted[rank].shape)} is wanted.",
            )
            require(part.dtype == whole.dtype, f"{told} a tensor of {part.dtype}; `x` is of {whole.dtype}.")
            require(close(part, wanted[rank]), f"{told} {numbers(part)}; one process has {numbers(wanted[rank])}.")
        require(max(ranks.messages) <= 1, f"{asked}: right, but with {max(ranks.messages)} all-reduces; one is enough.")
        require(min(ranks.messages) == 1, f"{asked}: right, but a rank makes no all-reduce; one is wanted.")
        require(
            max(ranks.sent) <= rows + 1,
            f"{asked}: right, but a rank adds up {max(ranks.sent)} numbers, where {rows + 1} are enough.",
        )
    right("A sum and a count can be added up; a mean or a root cannot.")
