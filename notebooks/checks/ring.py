"""Checks of lesson 20."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from checks import exercise, require, returned, right, shown
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Call, run_on_ranks
from checks.ranks import Ranks

Tensor = torch.Tensor
Shift = Callable[[Tensor], Tensor]
FLOAT = torch.float32
RINGS = (  # ranks, numbers in a chunk, and their dtype
    (2, 1, FLOAT), (3, 2, FLOAT), (4, 1, FLOAT), (5, 3, FLOAT), (3, 2, torch.int64), (4, 1, torch.double)
)  # fmt: skip


@exercise(
    "Write down, for 3 ranks, what rank 0 sends in step 0 and in step 1, and what it receives. The formulas for the "
    "two chunk numbers stand in the text.",
    "Begin with `sums = [chunk.clone() for chunk in x.chunk(size)]`; in each step add what `shift` returns to the "
    "chunk that has just come.",
)
def reduce_scatter(answer: Callable[[Tensor, int, int, Shift], Tensor]) -> None:
    """`answer(x, rank, size, shift)` is the sum over the ranks of chunk `rank`, and sends each other chunk once."""
    for size, each, dtype in RINGS:
        given = vectors(size, size * each, dtype)
        ranks = Ranks(size)
        parts = tried(answer, ranks, given)
        for rank, part in enumerate(parts):
            wanted = torch.stack(given).sum(0)[rank * each : (rank + 1) * each]
            whole = torch.stack(given).sum(0)
            told = f"{size} ranks: rank {rank} returns {numbers(part)}"
            require(part.shape != whole.shape or size == 1,
                    f"{told}; one chunk of {each} is wanted, not the whole vector of {size * each}.")  # fmt: skip
            require(part.shape == wanted.shape, f"{told}; its chunk is a vector of length {each}.")
            require(part.dtype == dtype, f"{told} of {part.dtype}; `x` is of {dtype}.")
            require(not torch.equal(part, given[rank][rank * each : (rank + 1) * each]),
                    f"{told}, which is its own chunk {rank}: nothing was added to it.")  # fmt: skip
            other = next((k for k in range(size) if torch.equal(part, whole[k * each : (k + 1) * each])), rank)
            require(other == rank, f"{told}. That is a whole sum, but of chunk {other}: rank {rank} should end with "
                    f"chunk {rank}.")  # fmt: skip
            require(torch.equal(part, wanted), f"{told}; the sum of chunk {rank} over the ranks is {numbers(wanted)}.")
        counted(ranks, (size - 1) * each, size - 1)
    right("Each rank has one whole sum, and has sent every other chunk once.")


@exercise(
    "In step 0 a rank sends the chunk that it has. What is the only new thing that it has in step 1?",
    "Begin with `chunks = [None] * size` and `chunks[rank] = chunk`. What comes in step `step` has the number "
    "`(rank - step - 1) % size`.",
)
def all_gather(answer: Callable[[Tensor, int, int, Shift], Tensor]) -> None:
    """`answer(chunk, rank, size, shift)` is the chunks of all ranks, in their order, as one vector."""
    for size, each, dtype in RINGS:
        given = vectors(size, each, dtype)
        ranks = Ranks(size)
        wanted = torch.cat(given)
        for rank, whole in enumerate(tried(answer, ranks, given)):
            told = f"{size} ranks: rank {rank} returns {numbers(whole)}"
            require(whole.shape == wanted.shape,
                    f"{told}; it should be one vector of {size} chunks of {each}.")  # fmt: skip
            require(whole.dtype == dtype, f"{told} of {whole.dtype}; the chunks are of {dtype}.")
            same = torch.equal(whole.sort().values, wanted.sort().values)
            require(not same or torch.equal(whole, wanted),
                    f"{told}: all chunks, but not in the order of the ranks: {numbers(wanted)}.")  # fmt: skip
            require(torch.equal(whole, wanted), f"{told}; the chunks of all ranks are {numbers(wanted)}.")
        counted(ranks, (size - 1) * each, size - 1)
    right("Each chunk has gone once round the ring, and stopped before the rank that it came from.")


@exercise(
    "What does `reduce_scatter` need of its vector? What do a few zeros at its end change in the sums?",
    "Begin with `flat = x.flatten()` and `missing = -len(flat) % size`, the number of zeros that are missing.",
)
def all_reduce(answer: Callable[[Tensor, int, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], Tensor]) -> None:
    """`answer(x, size, reduce_scatter, all_gather)` is the sum over the ranks, in the shape of `x`."""
    for size, shape in ((2, (4,)), (3, (7,)), (4, (3, 2)), (3, (2, 2, 3)), (4, (1,)), (2, (5,)), (4, ())):
        count = torch.Size(shape).numel()
        dtype = torch.int64 if shape == (7,) else FLOAT
        given = [each.reshape(shape) for each in vectors(size, count, dtype)]
        if shape == (3, 2):
            given = [each.reshape(2, 3).T for each in given]  # not contiguous
        ranks = Ranks(size)
        wanted = torch.stack(given).sum(0)
        padded = count + -count % size
        asked = f"{size} ranks, tensors of shape {shape}"

        def scattered(
            rank: int, ranks: Ranks = ranks, asked: str = asked, dtype: torch.dtype = dtype
        ) -> Callable[[Tensor], Tensor]:
            def part(vector: Tensor) -> Tensor:
                _vector(vector, ranks.size, asked, dtype)
                return ring_reduce_scatter(vector, rank, ranks.size, ranks.shift(rank))

            return part

        def gathered(
            rank: int, ranks: Ranks = ranks, asked: str = asked, dtype: torch.dtype = dtype
        ) -> Callable[[Tensor], Tensor]:
            def whole(chunk: Tensor) -> Tensor:
                _vector(chunk, 1, asked, dtype)
                return ring_all_gather(chunk, rank, ranks.size, ranks.shift(rank))

            return whole

        before = [each.clone() for each in given]
        found = ranks.run(
            lambda rank, of=given, size=size: returned(answer(of[rank], size, scattered(rank), gathered(rank)))
        )
        for rank, total in enumerate(found):
            told = f"{asked}: rank {rank} returns {numbers(total)}"
            require(isinstance(total, Tensor), f"{told}; a tensor is wanted.")
            require(total.shape == torch.Size(shape), f"{told} of shape {tuple(total.shape)}; that of `x` is wanted.")
            require(total.dtype == wanted.dtype, f"{told} of {total.dtype}; `x` is of {wanted.dtype}.")
            require(torch.equal(total, wanted), f"{told}; the sum over the ranks is {numbers(wanted)}.")
            require(torch.equal(given[rank], before[rank]), f"{asked}: `x` itself was changed; return a new tensor.")
        counted(ranks, 2 * (size - 1) * padded // size, 2 * (size - 1), asked)
    right("Any shape, any number of ranks, and not even twice the tensor is sent.")


@exercise(
    "What must stand between an `isend` and the use of what comes? Write `shift(tensor)` of exercise 1 first, with "
    "`dist.isend` to the next rank and `dist.recv` from the one before.",
    "Begin with `came = torch.empty_like(tensor)` and `sending = dist.isend(tensor, (rank + 1) % size)`; then receive, "
    "and wait for `sending`. With this `shift` the whole is a call of `rings.all_reduce`.",
)
def on_ranks(answer: Callable[[Tensor], Tensor]) -> None:
    """`answer(x)` runs on each worker: the sum over the ranks, by 2 (n - 1) messages to the next rank."""
    size, tensors = 4, [vectors(4, 12), [each.reshape(3, 7) for each in vectors(4, 21, torch.int64)]]
    given = [(own,) for own in zip(*tensors, strict=True)]
    ran = run_on_ranks(each_sum, answer, given)
    by_torch = run_on_ranks(each_sum, torch_sum, given)
    for rank, results in enumerate(ran.values):
        for (found, after), (wanted, _), before in zip(results, by_torch.values[rank], given[rank][0], strict=True):
            _same_sum(rank, returned(found), wanted, before)
            require(torch.equal(before, after), f"On the workers: `x` of rank {rank} was changed; return a new tensor.")
    for rank, calls in enumerate(ran.calls):
        _messages_of_a_ring(rank, size, calls, [-(-own[0].numel() // size) * own[0].itemsize for own in tensors])
    right("Your ring, on real ranks: the sums of torch's all-reduce, in 2 (n - 1) messages of a chunk each.")


def each_sum(answer: Callable[[Tensor], Tensor], given: tuple[Tensor, ...]) -> list[tuple[Any, Tensor]]:
    """On a worker: return the result of the answer for each tensor, and the tensor after it."""
    return [(answer(x), x) for x in given]


def torch_sum(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def _same_sum(rank: int, found: Any, wanted: Tensor, own: Tensor) -> None:
    told = f"On the workers: rank {rank} returns {numbers(found)}"
    require(isinstance(found, Tensor), f"{told}, not a tensor.")
    require(not torch.equal(found.flatten(), own.flatten()), f"{told}, its own tensor: nothing was added.")
    require(found.shape == wanted.shape,
            f"{told} of shape {tuple(found.shape)}; that of `x` is wanted, {tuple(wanted.shape)}.")  # fmt: skip
    require(found.dtype == wanted.dtype, f"{told} of {found.dtype}; `x` is of {wanted.dtype}.")
    rounded = torch.allclose(found.double(), wanted.double(), rtol=1e-6, atol=0.0)
    require(torch.equal(found, wanted) or not rounded, f"{told}, rounded to float32 on its way: `x` is of {own.dtype}.")
    require(torch.equal(found, wanted), f"{told}; torch's `all_reduce` gives {numbers(wanted)}.")


def _messages_of_a_ring(rank: int, size: int, calls: list[Call], chunks: list[int]) -> None:
    """2 (n - 1) messages for each tensor, each a chunk, to the next rank; and no collective."""
    collectives = sorted({call.op for call in calls} - {"send"})
    require(not collectives, f"Right sums; but in the trace rank {rank} calls {', '.join(collectives)}. "
            "Use messages only.")  # fmt: skip
    astray = sorted({str(call.to) for call in calls if call.to != (rank + 1) % size})
    require(not astray, f"Right sums; but in the trace rank {rank} sends to rank {' and '.join(astray)}, too. "
            f"On a ring it sends to rank {(rank + 1) % size} only.")  # fmt: skip
    sizes, wanted = [call.size for call in calls], [chunk for chunk in chunks for _ in range(2 * (size - 1))]
    require(sizes == wanted, f"Right sums; but in the trace rank {rank} sends {len(sizes)} messages, of {sum(sizes)} "
            f"bytes. For the {len(chunks)} tensors of the check a ring sends {len(wanted)}, of {sum(wanted)} bytes: "
            "each message is a chunk.")  # fmt: skip


@exercise(
    "After the round with distance 1, whose tensors are in the sum of rank 0? Whose must be added in the next round, "
    "and which rank has them all?",
    "Begin with `total = x.clone()` and `distance = 1`; the partner is `rank ^ distance`, and the distance doubles "
    "while it is below `size`.",
)
def doubling(answer: Callable[[Tensor, int, int, Callable[[int, Tensor], Tensor]], Tensor]) -> None:
    """`answer(x, rank, size, exchange)` is the sum over the ranks, after log2(size) exchanges."""
    for size, dtype in ((2, FLOAT), (4, FLOAT), (8, FLOAT), (1, FLOAT), (16, torch.int64)):
        given = vectors(size, 3, dtype)
        before = [each.clone() for each in given]
        ranks = Ranks(size)
        wanted = torch.stack(given).sum(0)
        found = ranks.run(lambda rank, of=given, ranks=ranks: returned(
            answer(of[rank], rank, ranks.size, ranks.exchange(rank))))  # fmt: skip
        for rank, total in enumerate(found):
            told = f"{size} ranks: rank {rank} returns {numbers(total)}"
            require(isinstance(total, Tensor) and total.shape == wanted.shape, f"{told}; a vector of 3 is wanted.")
            require(total.dtype == dtype, f"{told} of {total.dtype}; `x` is of {dtype}.")
            require(torch.equal(total, wanted), f"{told}; the sum over the ranks is {numbers(wanted)}.")
            require(torch.equal(given[rank], before[rank]), f"{size} ranks: `x` was changed; return a new tensor.")
        rounds = size.bit_length() - 1
        most = max(ranks.messages)
        require(most == rounds, f"Right sums; but a rank of {size} has sent {most} messages where {rounds} do.")
    right("log2 n messages for each rank: few, and each of them has the whole tensor.")


# -- what the answers are tried with
def vectors(size: int, length: int, dtype: torch.dtype = FLOAT) -> list[Tensor]:
    """A vector for each rank: no two sums of some of their numbers are equal, and all are exact, though not in float32
    if `dtype` is larger."""
    far = 0 if dtype == FLOAT else 2**40
    return [torch.arange(1, length + 1, dtype=dtype) + (far + 32 * 5**rank) for rank in range(size)]


def tried(answer: Callable[..., Any], ranks: Ranks, given: list[Tensor]) -> list[Tensor]:
    """What the ranks return; the tensors given must stay as they are."""
    before = [each.clone() for each in given]
    found = ranks.run(lambda rank: returned(answer(given[rank], rank, ranks.size, ranks.shift(rank))))
    for rank, value in enumerate(found):
        require(isinstance(value, Tensor), f"{ranks.size} ranks: rank {rank} returns {shown(value)}, not a tensor.")
        require(torch.equal(given[rank], before[rank]),
                f"{ranks.size} ranks: the tensor that rank {rank} was given has changed; work on a copy.")  # fmt: skip
    return found


def counted(ranks: Ranks, numbers: int, messages: int, asked: str = "") -> None:
    """No rank sends more than it must."""
    asked = asked or f"{ranks.size} ranks"
    for sent, wanted, what in ((ranks.sent, numbers, "numbers"), (ranks.messages, messages, "messages")):
        require(max(sent) <= wanted, f"{asked}: right, but rank {sent.index(max(sent))} has sent {max(sent)} {what} "
                f"where {wanted} do.")  # fmt: skip


def numbers(value: Any) -> str:
    return shown([round(each) for each in value.flatten().tolist()] if isinstance(value, Tensor) else value)


def _vector(value: Any, parts: int, asked: str, dtype: torch.dtype) -> None:
    require(isinstance(value, Tensor), f"{asked}: a tensor is to be sent, not {shown(value)}.")
    require(value.dim() == 1, f"{asked}: the vector that you send has shape {tuple(value.shape)}; flatten it first.")
    require(value.dtype == dtype, f"{asked}: the vector that you send is of {value.dtype}; `x` is of {dtype}.")
    require(len(value) % parts == 0,
            f"{asked}: `reduce_scatter` got {len(value)} numbers, which are not {parts} equal chunks.")  # fmt: skip


def ring_reduce_scatter(x: Tensor, rank: int, size: int, shift: Shift) -> Tensor:
    sums = [chunk.clone() for chunk in x.reshape(size, -1)]
    for step in range(size - 1):
        sums[(rank - step - 2) % size] += shift(sums[(rank - step - 1) % size])
    return sums[rank]


def ring_all_gather(chunk: Tensor, rank: int, size: int, shift: Shift) -> Tensor:
    chunks = {rank: chunk}
    for step in range(size - 1):
        chunks[(rank - step - 1) % size] = shift(chunks[(rank - step) % size])
    return torch.cat([chunks[number] for number in range(size)])
