"""Checks of lesson 27."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from checks import NotYet, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks
from checks.ranks import AllReduce, Ranks

FORMATS = {3: "3 bits", 7: "7 bits (bfloat16)", 10: "10 bits (float16)", 23: "23 bits (float32)"}


def _spacing(value: float, bits: int) -> float:
    return 2.0 ** (math.frexp(value)[1] - 1 - bits)


def _nearest(value: float, bits: int) -> float:
    return round(value / _spacing(value, bits)) * _spacing(value, bits) if value else 0.0


VALUES = (1.0, 1.1, 3.14159, 0.1, -2.7, 1000.3, 0.0, 1e-5, 255.4, -0.3, 6.02e23, 1.999)
TINY = 2.0**-40  # too small for a float32 beside 1


@exercise(
    "The neighbours of a number lie at whole multiples of the spacing. With how many multiples should you end, and "
    "what does Python's `round` do with a half?",
    "Begin with `_, exponent = math.frexp(value)` and `spacing = 2.0 ** (exponent - 1 - bits)`. Zero has no spacing of "
    "its own, but it is a multiple of each.",
)
def rounded(answer: Callable[[float, int], Any]) -> None:
    """`answer(value, bits)` is the nearest number with so many bits of fraction; a tie goes to the even one."""
    for bits, name in FORMATS.items():
        step = 2.0**-bits
        ties = [1 + step / 2, 1 + 3 * step / 2, -(1 + step / 2), 2 * (1 + 3 * step / 2), (1 + 5 * step / 2) / 8]
        beside = [1 + step / 2 + TINY, 1 + 3 * step / 2 - TINY, -(1 + step / 2 + TINY)]  # nearly ties
        for value in (*VALUES, *ties, 2 - step / 4, *beside, 1e300, -3e-200):
            wanted = _nearest(value, bits)
            with trying():
                found = returned(answer(value, bits))
            found = read(found, float, "It should return a number")
            if found != wanted:
                raise NotYet(_why(value, found, wanted, bits, name))
        if bits in (7, 10):
            dtype = torch.bfloat16 if bits == 7 else torch.float16
            assert all(_nearest(v, bits) == torch.tensor(v, dtype=dtype).item() for v in ties), "the check itself"
    right("All formats round in this way; they differ in the number of bits.")


def _why(value: float, found: float, wanted: float, bits: int, name: str) -> str:
    case = f"{value!r} with {name}"
    spacing = _spacing(value, bits) if value else 0.0
    if not math.isfinite(found) or (spacing and abs(found / spacing - round(found / spacing)) > 1e-6):
        return f"{case}: {found!r} cannot be written with so few bits."
    if abs(found - value) == abs(wanted - value):
        return f"{case}: {found!r} and {wanted!r} are equally near. The one whose last bit is 0 is right."
    return f"{case}: you say {found!r}, but {wanted!r} is nearer."


@exercise(
    "A weight stays as it is if the sum is nearer to the weight than to its neighbour. How far away is the neighbour?",
    "With `_, exponent = math.frexp(weight)` the spacing is `2.0 ** (exponent - 1 - bits)`. Where between the weight "
    "and its neighbour does the rounding change?",
)
def least_update(answer: Callable[[float, int], Any]) -> None:
    """`answer(weight, bits)`: updates below it, away from zero, leave the weight as it is."""
    for bits, name in FORMATS.items():
        for weight in (1.0, 3.0, 0.125, -6.0, 0.15625, 96.0, 1.75, -0.375, 2.0**-20, -4.0, -0.5):
            with trying():
                found = returned(answer(weight, bits))
            found = read(found, float, "It should return a number")
            case, spacing = f"weight {weight}, {name}", _spacing(weight, bits)
            if found == spacing / 2:
                continue
            require(
                found != spacing,
                f"{case}: {found} is the whole way to the neighbour. Half of it is enough to change the rounding.",
            )
            require(found > 0, f"{case}: {found} is not the size of an update.")
            if found < spacing / 2:
                after = _nearest(abs(weight) + (found + spacing / 2) / 2, bits)
                raise NotYet(f"{case}: an update a little larger than {found:.4g} leaves the weight as it is: {after}.")
            raise NotYet(f"{case}: a smaller update than {found:.4g} changes the weight already.")
    right("An optimizer whose steps are smaller than this one trains nothing.")


CLEAN, INF, NAN = "clean", math.inf, math.nan
STEPS = [  # what the gradients of each rank have; scale and clean steps before; the interval
    ([CLEAN], 8.0, 0, 3),
    ([INF], 8.0, 1, 3),
    ([CLEAN, INF], 1024.0, 2, 3),
    ([CLEAN, CLEAN], 1024.0, 2, 3),
    ([NAN, CLEAN], 1024.0, 1, 3),
    ([CLEAN, CLEAN, -INF], 4.0, 0, 2),
    ([CLEAN, CLEAN, CLEAN], 4.0, 0, 2),
    ([CLEAN, CLEAN, CLEAN], 4.0, 1, 2),
    ([CLEAN, CLEAN], 2.0, 0, 1),
    ([CLEAN], 2.0**125, 0, 3),  # each is finite, and their sum would not be
    ([NAN, INF, CLEAN], 64.0, 1, 3),
    ([CLEAN, NAN], 32.0, 1, 3),
]


@exercise(
    "Each rank sees only its own gradients, and all must decide alike. What is the smallest thing that they can share?",
    'A tensor with one number: 1 where a gradient of this rank is not finite, else 0. `all_reduce(flag, "max")` on '
    "every rank, in every step. Divide by the scale with which the loss was multiplied, not by the next one.",
)
def scaled_step(answer: Callable[[list[Tensor], float, int, int, AllReduce], Any]) -> None:
    """`answer(gradients, scale, clean, interval, all_reduce)` returns (apply, scale, clean), the same on all ranks."""
    for faults, scale, clean, interval in STEPS:
        ranks = Ranks(len(faults))
        given = [_scaled(rank, fault, scale) for rank, fault in enumerate(faults)]
        own = [list(gradients) for gradients in given]
        seen = [f"rank {rank} has {fault}" for rank, fault in enumerate(faults) if fault != CLEAN]
        case = f"{len(faults)} rank{'s' * (len(faults) > 1)}, {' and '.join(seen) or 'all gradients are finite'}"
        case += f", scale {scale:g}, {clean} clean before, interval {interval}"
        found = ranks.run(
            lambda rank, of=given, before=(scale, clean, interval), ranks=ranks: returned(
                answer(of[rank], *before, ranks.all_reduce(rank))
            )
        )
        for rank, each in enumerate(found):
            each = read(each, (object, float, int), "It should return (apply, scale, clean)")
            _judge(each, rank, faults, (scale, clean, interval), case)
            if not seen:
                wanted = _scaled(rank, CLEAN, 1.0)
                same = all(torch.allclose(a, b) for a, b in zip(own[rank], wanted, strict=True))
                require(
                    same,
                    f"{case}: the gradients of rank {rank} are not those of the loss. Divide them in place, by "
                    "the scale that this loss was multiplied with.",
                )
        if len(faults) > 1:
            require(all(ranks.calls), f"{case}: the ranks have shared nothing.")
        require(max(ranks.sent) <= 4, f"{case}: a rank has sent {max(ranks.sent)} numbers; one flag is enough.")
    right("All ranks step, or none does, and the scale stays the same everywhere.")


def _scaled(rank: int, fault: Any, scale: float) -> list[Tensor]:
    """Two gradients of a rank or three, as a loss that was multiplied by the scale leaves them. INF is in the last one,
    another fault in the first, of other ranks than 0 in the second."""
    gradients = [torch.arange(1.0, 4.0 + place) * (rank + 1) * scale for place in range(2 + rank % 2)]
    gradients[1] = gradients[1].view(2, 2)
    if fault != CLEAN:
        gradients[-1 if fault == INF else min(rank, 1)].view(-1)[1] = fault
    return gradients


def _judge(found: Any, rank: int, faults: list[Any], before: tuple[float, int, int], case: str) -> None:
    scale, clean, interval = before
    apply, new_scale, new_clean = found
    spoiled = any(fault != CLEAN for fault in faults)
    require(isinstance(apply, bool | int | Tensor), f"{case}: `apply` is True or False, not {shown(apply)}.")
    if bool(apply) == spoiled:
        if not spoiled:
            raise NotYet(f"{case}: rank {rank} does not step.")
        own = faults[rank] != CLEAN
        raise NotYet(f"{case}: rank {rank} steps" + (" with it." if own else ", and the other rank does not."))
    grows = not spoiled and clean + 1 == interval
    wanted = (scale / 2, 0) if spoiled else (scale * 2, 0) if grows else (scale, clean + 1)
    require(
        float(new_scale) == wanted[0],
        f"{case}: the next scale on rank {rank} is {shown(new_scale)}, and should be {wanted[0]:g}.",
    )
    require(
        new_clean == wanted[1],
        f"{case}: the count of clean steps on rank {rank} is {shown(new_clean)} afterwards, and should be {wanted[1]}.",
    )


class _Kinds(TorchDispatchMode):
    """Which dtypes the results of operations have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.add(result.dtype)
        return result


SUMS = [  # the start, the update, how often
    (1.0, 0.001, 100),
    (1.0, -0.0005, 100),
    (256.0, 0.9, 60),
    (-2.0, -0.0031, 60),
]


# -- unscale, clip and skip on the workers
RANKS, LARGEST, SCALE = 4, 2.0, 1024.0
PIECES = {  # of the gradients of a model, before the scale: what each rank has in its tensors
    "a norm below the largest": [[[0.3, -0.4]], [[0.1]], [[0.2], [0.6, 0.1]], [[-0.5]]],
    "a norm above the largest": [[[3.0, -4.0]], [[1.0]], [[2.0], [6.0, 1.0]], [[-5.0]]],
    "rank 1 has no gradients": [[[3.0, 1.0]], [], [[2.0]], [[4.0], [-1.0]]],
    "rank 2 has an infinite gradient": [[[0.3, -0.4]], [[0.1]], [[0.2], [float("inf"), 0.1]], [[-0.5]]],
    "rank 3 has a nan": [[[0.3, -0.4]], [[0.1]], [[0.2], [0.6, 0.1]], [[float("nan")]]],
}


@exercise(
    "The square of the norm of all gradients is a sum over the ranks. What becomes of a sum in which one number is "
    "infinite, or nan?",
    "Begin with `square = torch.zeros(())`, to which each rank adds the squares of its own gradients divided by the "
    "scale. After `dist.all_reduce(square)` all ranks know the norm, and whether to skip.",
)
def on_ranks(answer: Callable[[list[Tensor], float, float], bool]) -> None:
    """`answer(gradients, scale, most)` runs on each worker: unscaled and clipped alike, or skipped by all."""
    given = [([[torch.tensor(each) * SCALE for each in pieces[rank]] for pieces in PIECES.values()],)
             for rank in range(RANKS)]  # fmt: skip
    ran = run_on_ranks(each_case, answer, given)
    for number, (case, pieces) in enumerate(PIECES.items()):
        _alike(case, pieces, [values[number] for values in ran.values])
    _one_all_reduce(ran)
    right("One number for each step: it clips the gradients of all ranks alike, and tells them to skip together.")


def each_case(
    answer: Callable[[list[Tensor], float, float], Any], cases: list[list[Tensor]]
) -> list[tuple[Any, list[Tensor]]]:
    """On a worker: for each case what the answer returns, and the gradients after it."""
    return [(answer(gradients, SCALE, LARGEST), gradients) for gradients in cases]


def _alike(case: str, pieces: list[list[list[float]]], results: list[tuple[Any, list[Tensor]]]) -> None:
    own = [torch.tensor([number for piece in each for number in piece]) for each in pieces]
    squares = [float(each.square().sum()) for each in own]
    norm = math.sqrt(sum(squares))
    of_ranks = sum(map(math.sqrt, squares))
    of_each = sum(math.hypot(*piece) for each in pieces for piece in each)  # the sum of the norms of all tensors
    steps = [read(result, bool, f"{case}: `True` or `False` is wanted") for result, _ in results]
    steps_alike = len(set(steps)) == 1
    odd = steps.index(False) if not steps_alike else 0
    require(steps_alike, f"{case}: rank {odd} skips the step, and rank {steps.index(True) if not steps_alike else 0} "
            "does not. They must decide alike.")  # fmt: skip
    require(steps[0] == math.isfinite(norm), f"{case}: all ranks {'step' if steps[0] else 'skip'}.")
    for rank, (_, gradients) in enumerate(results):
        found = torch.cat([each.flatten() for each in gradients]) if gradients else torch.zeros(0)
        if not steps[0]:
            require(torch.allclose(found, own[rank] * SCALE, equal_nan=True), f"{case}: skipped, but the gradients of "
                    f"rank {rank} have changed.")  # fmt: skip
            continue
        wanted = own[rank] * min(1.0, LARGEST / norm)
        slips = {
            "They are still multiplied by the scale.": (own[rank] * SCALE, wanted * SCALE),
            "They are clipped by the norm of this rank's gradients alone.":
                (own[rank] * min(1.0, LARGEST / max(math.sqrt(squares[rank]), 1e-9)),),
            "They are clipped by the sum of the ranks' norms. Squares can be added up, norms cannot.":
                (own[rank] * min(1.0, LARGEST / sum(map(math.sqrt, squares))),),
            "They are clipped by the root of a sum of norms, and not of squares.":
                tuple(own[rank] * min(1.0, LARGEST / math.sqrt(norms)) for norms in (of_ranks, of_each)),
            "They are clipped by the square of the norm.": (own[rank] * min(1.0, LARGEST / norm**2),),
            "They are clipped by the norm before the scale is taken out.": (own[rank] * LARGEST / (norm * SCALE),),
            "They are not clipped.": (own[rank],),
        }  # fmt: skip
        close = [told for told, others in slips.items() if any(torch.allclose(found, one) for one in others)]
        require(torch.allclose(found, wanted), f"{case}: rank {rank} has {_short(found)} and not {_short(wanted)}."
                f"{''.join(f' {told}' for told in close[:1])}")  # fmt: skip


def _short(numbers: Tensor) -> str:
    return f"[{', '.join(f'{number:.4g}' for number in numbers.tolist())}]"


def _one_all_reduce(ran: Run) -> None:
    for rank, calls in enumerate(ran.calls):
        told = f"Right; but in the trace rank {rank}"
        others = sorted({call.op for call in calls} - {"all_reduce"})
        require(not others, f"{told} calls {', '.join(others)}. All-reduces are enough.")
        require(len(calls) <= len(PIECES), f"{told} has {len(calls)} all-reduces in {len(PIECES)} steps. One for each "
                "is enough.")  # fmt: skip
        largest = max(call.size for call in calls)
        require(largest <= 8, f"{told} sends {largest} bytes. A single number is enough.")


@exercise(
    "After `new = total + update`, how much of the update has really been added? `new - total` says it.",
    "Add `lost` to the update first. The difference between this sum and `new - total` is lost this time.",
)
def compensated(answer: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    """`answer(total, lost, update)` adds in bfloat16, and hands on what was rounded away."""
    for start, update, times in SUMS:
        total, lost = (torch.full((3,), value, dtype=torch.bfloat16) for value in (start, 0.0))
        step = torch.tensor([update, update * 2, 0.0]).bfloat16()
        unchanged, exact = step.clone(), start + times * step.double()
        case = f"{times} times {update} added to {start}"
        after_one = None
        longer: set[str] = set()
        for _ in range(times):
            with trying(), _Kinds() as kinds:
                pair = returned(answer(total, lost, step))
            total, lost = read(pair, (Tensor, Tensor), "It should return (total, lost), two tensors")
            require(torch.equal(step, unchanged), f"{case}: `update` has changed; leave it as it was given.")
            require(
                total.dtype == lost.dtype == torch.bfloat16,
                f"Both results are bfloat16: nothing longer may be kept. They are {total.dtype} and {lost.dtype}.",
            )
            longer |= {str(each) for each in kinds.seen - {torch.bfloat16} if each.is_floating_point}
            after_one = after_one or (total[0].item(), lost[0].item(), start + step[0].item())
        worst = int((total.double() - exact).abs().argmax())
        near = 1.5 * _spacing(float(exact[worst]), 7)
        require(
            abs(total[worst].item() - exact[worst].item()) <= near,
            f"{case.replace(str(update), f'{step[worst].item():.4g}')}: the total is {total[worst].item():g}, and "
            f"should be near {exact[worst].item():.4g}.",
        )
        assert after_one is not None
        first, still, wanted = after_one
        require(
            abs(first + still - wanted) <= abs(wanted) * 2**-12,
            f"{start} and one update of {step[0].item():.4g}: the total is {first:g} and `lost` is {still:.4g}. `lost` "
            f"is what is still to be added to the total, with its sign: together they should be {wanted:.6g}.",
        )
        require(not longer, f"All sums are done in bfloat16; yours uses {' and '.join(sorted(longer))}.")
    right("Two numbers of 16 bits remember what one of them would forget.")
