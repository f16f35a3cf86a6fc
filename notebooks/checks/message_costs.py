"""Checks of lesson 03."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import costs
import torch

from checks import NotYet, differ, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

SIZES = [2**k for k in range(3, 25)]
WOBBLE = (0.04, -0.09, 0.02, 0.1, -0.03, -0.06, 0.07)  # relative errors of measured times


@exercise(
    "Dividing an equation by the measured time turns its error into a relative one. What is left on the right side?",
    "Begin with `t` and `n` as tensors; the rows of the matrix are (1 / t, n / t), and each right "
    "side is 1. The solution has alpha and 1 / beta.",
)
def fit(answer: Callable[[Sequence[float], Sequence[float]], tuple[float, float]]) -> None:
    """`answer(sizes, times)` is (alpha, beta) with the least squares of relative errors."""
    for alpha, beta, sizes in ((1e-4, 1e9, SIZES), (2e-6, 2.5e10, SIZES), (0.05, 4e6, [100_000, 10, 5_000, 300])):
        found = _fitted(answer, sizes, [alpha + n / beta for n in sizes])
        asked = f"Points that lie on the line with alpha = {alpha:.3g} s and beta = {beta:.3g} bytes/s"
        swapped = _near(found[0], beta) and _near(found[1], alpha)
        require(not swapped, f"{asked}: you return beta first. The order is (alpha, beta).")
        require(not _near(found[1], 1 / beta),
                f"{asked}: your beta is {found[1]:.3g}, seconds for each byte. beta is bytes per second.")  # fmt: skip
        require(_near(found[0], alpha) and _near(found[1], beta),
                f"{asked}: you find alpha = {found[0]:.3g} and beta = {found[1]:.3g}."
                + _slip_of_fit(found, sizes, [alpha + n / beta for n in sizes]))  # fmt: skip
    for alpha, beta in ((1e-4, 1e9), (3e-5, 1e10)):
        times = [(alpha + n / beta) * (1 + WOBBLE[k % len(WOBBLE)]) for k, n in enumerate(SIZES)]
        found, wanted = _fitted(answer, SIZES, times), costs.fit(SIZES, times)
        for name, mine, best, unit in zip(("alpha", "beta"), found, wanted, ("s", "bytes/s"), strict=True):
            told = differ(mine, best, f" {unit}; the least squares of relative errors have {name} = ")
            require(_near(mine, best), f"Points up to 10 % off the line: you find {name} = {told} {unit}."
                    f"{_slip_of_fit(found, SIZES, times)}")  # fmt: skip
    right("Small messages fix alpha, large ones fix beta, and each counts as much as the other.")


def _fitted(answer: Callable[..., Any], sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    given = list(sizes), list(times)
    with trying("The function"):
        found = returned(answer(*given))
    require(given == (list(sizes), list(times)), "The lists that the function was given have changed.")
    alpha, beta = read(found, (float, float), "(alpha, beta) is wanted")
    return alpha, beta


def _slip_of_fit(found: tuple[float, float], sizes: Sequence[float], times: Sequence[float]) -> str:
    """Return the sentence on a mistake that may have led to an answer of `fit`; empty if none is known."""
    n, t = torch.tensor(sizes, dtype=torch.double), torch.tensor(times, dtype=torch.double)
    alpha, per_byte = (
        torch.linalg.lstsq(torch.stack([torch.ones_like(n), n], 1), t[:, None]).solution.flatten().tolist()
    )
    if _near(found[0], alpha) and _near(found[1], 1 / per_byte):
        return " Yours are those of plain least squares, in which one large message outweighs all small ones."
    lost = abs(found[0]) < 1e-3 * min(times)
    return " Your alpha is next to nothing. In float32 it is lost beside the large messages." if lost else ""


@exercise(
    "Draw the lanes of two hops with three pieces. When does the last piece begin on the first hop, and how many hops "
    "has it still to go?",
    "Begin with the time of one piece on one hop, `each = alpha + n / k / beta`; count how many of these pass.",
)
def relay(answer: Callable[[float, int, int, float, float], float]) -> None:
    """`answer(n, k, hops, alpha, beta)` is what playing it through takes."""
    for n, k, hops, alpha, beta in (
        (1e6, 1, 1, 1e-3, 1e9), (1e6, 4, 1, 1e-3, 1e9), (1e6, 1, 3, 1e-3, 1e9), (6e6, 3, 2, 1e-3, 1e9),
        (1e7, 7, 4, 5e-4, 2e9), (10, 3, 2, 0.25, 16.0),
    ):  # fmt: skip
        with trying("The function"):
            found = returned(answer(n, k, hops, alpha, beta))
        wanted = _played(n, k, hops, alpha, beta)
        asked = f"{n:g} bytes in {k} piece{'s' * (k > 1)} over {hops} hop{'s' * (hops > 1)}"
        found = read(found, float, f"{asked}: a number of seconds is wanted")
        require(_near(found, wanted), f"{asked}, alpha = {alpha:g} s, beta = {beta:g} bytes/s: it takes "
                f"{differ(wanted, found, ' s; you say ', 6)} s."
                + name_slip(found, _slips_of_relay(n, k, hops, alpha, beta)))  # fmt: skip
    right("With one hop, pieces cost only latency; with more hops they let the hops work at once.")


def _slips_of_relay(n: float, k: int, hops: int, alpha: float, beta: float) -> dict[str, float]:
    """Return the results of natural mistakes."""
    each = alpha + n / k / beta
    return {
        "In yours the hops never work at the same time.": k * hops * each,
        "In yours all pieces leave at once; a hop sends one after another.": hops * each,
        "In yours the last piece arrives one piece too late.": (k + hops) * each,
        "In yours the last piece arrives one piece too early.": (k + hops - 2) * each,
        "In yours each piece has all the bytes.": (k + hops - 1) * (alpha + n / beta),
        "In yours alpha is paid once; each piece pays it, on each hop.": alpha + (k + hops - 1) * n / k / beta,
        "beta is bytes per second: bytes are divided by it.": (k + hops - 1) * (alpha + n / k * beta),
    }


def _played(n: float, k: int, hops: int, alpha: float, beta: float) -> float:
    """Piece by piece: a hop begins a piece when the piece has come and the piece before has left."""
    free = [0.0] * hops
    came = 0.0
    for _ in range(k):
        came = 0.0
        for hop in range(hops):
            came = free[hop] = max(free[hop], came) + alpha + n / k / beta
    return came


@exercise(
    "The time is (k + hops - 1) · (alpha + n / (k · beta)). What stands before k when it is multiplied out, and what "
    "before 1 / k?",
    "Begin with `ideal = math.sqrt((hops - 1) * n / (alpha * beta))`, and compare the times of the two whole numbers "
    "beside it; there is at least one piece.",
)
def best_pieces(answer: Callable[[float, int, float, float], int]) -> None:
    """`answer(n, hops, alpha, beta)` is the whole number of pieces with the least time."""
    for n, hops, alpha, beta in (
        (4e6, 2, 1e-3, 1e9), (1.45**2 * 1e6, 2, 1e-3, 1e9), (9.3e6, 3, 1e-3, 1e9), (1e6, 1, 1e-3, 1e9),
        (1e3, 2, 1e-3, 1e9), (2.5**2 * 1e6, 4, 1e-3, 1e9), (1e9, 2, 1e-4, 1e8), (2.46**2 * 1e6, 2, 1e-3, 1e9),
        (1e9, 2, 1e-6, 1e8), (1e11, 2, 1e-8, 1e8),
    ):  # fmt: skip
        with trying("The function"):
            found: Any = returned(answer(n, hops, alpha, beta))
        asked = f"{n:g} bytes over {hops} hop{'s' * (hops > 1)}, alpha = {alpha:g} s, beta = {beta:g} bytes/s"
        found = read(found, int, f"{asked}: a whole number is wanted")
        require(found >= 1, f"{asked}: you say {found} pieces; there is at least one.")
        mine = costs.relay_time(n, found, hops, alpha, beta)
        ideal = math.floor(math.sqrt((hops - 1) * n / (alpha * beta)))
        best = min((max(1, ideal), ideal + 1), key=lambda k: costs.relay_time(n, k, hops, alpha, beta))
        least = costs.relay_time(n, best, hops, alpha, beta)
        told = differ(mine * 1e3, least * 1e3, f" ms; with {best} it takes ")
        require(mine <= least * (1 + 1e-9), f"{asked}: you say {found}, which takes {told} ms."
                + _slip_of_pieces(found, n, hops, alpha * beta))  # fmt: skip
    right("A balance of latency, which wants few pieces, and waiting, which wants many.")


def _slip_of_pieces(found: int, n: float, hops: int, half: float) -> str:
    """Return the sentence on a mistake that may have led to this number of pieces; empty if none is known."""
    square = (hops - 1) * n / half
    ideal, later = math.sqrt(square), math.sqrt(hops * n / half)
    if found in (math.floor(ideal), math.ceil(ideal)):
        return f" The sum is least at {ideal:.4g}; of the two numbers beside it the nearer need not be the better one."
    if found in (math.floor(later), math.ceil(later)):
        return " Yours would be right for one hop more."
    return " Yours is without the root." if found in (math.floor(square), math.ceil(square)) else ""


@exercise(
    "Which ranks are busy in a round, and for how long does each of them send? For how long does each receive?",
    "Begin each round with two dicts, of the seconds that each rank sends and receives; a round takes the largest of "
    "all these numbers, and an empty round takes none.",
)
def schedule(answer: Callable[[Sequence[costs.Round], float, float], float]) -> None:
    """`answer(rounds, alpha, beta)` is the sum over the rounds of the time of the busiest rank."""
    for what, rounds in (
        ("one message", [[(0, 1, 8e6)]]),
        ("two messages of other ranks at once", [[(0, 1, 8e6), (2, 3, 4e6)]]),
        ("rank 0 sends to two ranks", [[(0, 1, 8e6), (0, 2, 8e6)]]),
        ("two ranks send to rank 0", [[(1, 0, 8e6), (2, 0, 4e6)]]),
        ("two ranks exchange", [[(0, 1, 8e6), (1, 0, 8e6)]]),
        ("a message, a round without any, and a message", [[(0, 1, 8e6)], [], [(1, 2, 2e6)]]),
        ("small messages from rank 1, a large one from rank 0", [[(1, 2, 0), (1, 3, 0), (1, 0, 0), (0, 4, 5e5)]]),
        ("no round at all", []),
        ("two messages of ranks 9 and 11", [[(9, 11, 8e6), (11, 9, 4e6)]]),
        ("a ring of 4 ranks, 6 rounds", [[(rank, (rank + 1) % 4, 2e6) for rank in range(4)]] * 6),
    ):  # fmt: skip
        given = [list(messages) for messages in rounds]
        try:
            with trying("The function"):
                found = returned(answer(given, 1e-3, 1e9))
        except NotYet as hint:
            empty = " One of these rounds has no message at all." if [] in rounds else ""
            raise NotYet(f"{hint}{empty}") from None
        require(given == rounds, "The lists that the function was given have changed.")
        wanted = costs.schedule_time(rounds, 1e-3, 1e9)
        found = read(found, float, f"{what[0].upper()}{what[1:]}: a number of seconds is wanted")
        require(abs(found - wanted) < 1e-6 * max(wanted, 1e-3),
                f"{what[0].upper()}{what[1:]}, alpha = 1 ms and beta = 1 byte per ns: {_told(rounds)} takes "
                f"{differ(wanted * 1e3, found * 1e3, ' ms; you say ', 6)} ms."
                + name_slip(found, _slips_of_schedule(rounds, 1e-3, 1e9), within=1e-6))  # fmt: skip
    right("That is the cost of any collective, once you have written down who sends what in which round.")


def _slips_of_schedule(rounds: Sequence[costs.Round], alpha: float, beta: float) -> dict[str, float]:
    """Return the results of natural mistakes."""
    sums: dict[str, list[float]] = {"sends": [], "receives": [], "both": [], "once": [], "all": []}
    for messages in rounds:
        sends: dict[int, float] = {}
        receives: dict[int, float] = {}
        busy: dict[int, float] = {}
        for sender, receiver, size in messages:
            took = alpha + size / beta
            sends[sender] = sends.get(sender, 0.0) + took
            receives[receiver] = receives.get(receiver, 0.0) + took
            for rank in (sender, receiver):
                busy[rank] = busy.get(rank, 0.0) + took
        for kind, times in (("sends", sends), ("receives", receives), ("both", busy)):
            sums[kind].append(max(times.values(), default=0.0))
        sums["all"].append(sum(alpha + size / beta for _, _, size in messages))
        sums["once"].append(costs.schedule_time([messages], 0.0, beta) + alpha * bool(messages))
    longest = max((costs.schedule_time([messages], alpha, beta) for messages in rounds), default=0.0)
    return {
        "A rank sends its messages one after another.": sum(sums["receives"]),
        "A rank receives its messages one after another.": sum(sums["sends"]),
        "A rank may send and receive at the same time.": sum(sums["both"]),
        "Messages between other ranks are on their way at the same time.": sum(sums["all"]),
        "Each message of a rank has an alpha of its own.": sum(sums["once"]),
        "A round begins when the one before has ended.": longest,
    }


def _told(rounds: Sequence[costs.Round]) -> str:
    return shown([[(sender, to, f"{size / 1e6:g} MB") for sender, to, size in messages] for messages in rounds])


def _near(mine: float, wanted: float) -> bool:
    return abs(mine - wanted) <= 2e-3 * abs(wanted)
