"""The report of a comparison: the verdict on each value, the first difference with its cause, as text.

Guarantees
- `ok` is True only if no value of the reference was found wrong. Values that no rank has as the reference has them, and
  those that cannot be told, do not make it wrong: the report lists and counts them.
- `first` is the first wrong value in the order of execution. Where ranks go on with summands that nobody has added up,
  it is the value in summands, not the one that is wrong because of it; where they go on with rows in another order than
  those of the input, it is the first output in that order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rpcbench.base.errors import CompareError, count_noun
from rpcbench.compare.capture import BACKWARD, FORWARD, GRADIENT, INITIAL, INPUT, LOSS, STEP, Key
from rpcbench.compare.causes import explain
from rpcbench.compare.compare_runs import Runs
from rpcbench.compare.error_maps import map_errors
from rpcbench.compare.evidence import Evidence, dims_of_kind, find_reordered, rank_number
from rpcbench.compare.layouts import SUM, WHOLE
from rpcbench.compare.module_causes import explain_masks
from rpcbench.compare.names import describe_unmatched
from rpcbench.compare.type_annotations import annotate_values
from rpcbench.compare.verdicts import ABSENT, RIGHT, UNKNOWN, WRONG, Mesh, ValueVerdict

__all__ = ["CompareReport", "Difference"]

_MOST_LINES = 60  # of a report as text
_SIGNS = {RIGHT: "✓", WRONG: "✗", UNKNOWN: "?", ABSENT: "-"}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a parallel program and its reference.

    Args:
        phase: "initial", "forward", "loss", "backward", "gradient" or "step".
        name: Of the module, or the parameter, without wrappers; empty for the model itself and for the loss.
        cause: A sentence with what happened and what to do.
        ranks: The ranks whose values differ.
        error: Norm of the difference.
        allowed: Norm of the difference that round-off explains.
        step: The number of the step, from 0.
    """

    phase: str
    name: str
    cause: str
    ranks: tuple[int, ...]
    error: float
    allowed: float
    step: int = 0

    def __str__(self) -> str:
        step = f" of step {self.step}" if self.step else ""
        return f"{self.phase}{step} {self.name or 'of the model'}: {self.cause}."


@dataclass(frozen=True, slots=True, repr=False)
class CompareReport:
    """What `cluster.compare` has found. `print(report)` shows it as text.

    Args:
        mesh: The dimensions of the ranks' mesh.
        verdicts: On each value of the reference, in the order of execution.
        first: The first difference, or None.
        unmatched: Which modules and parameters no rank has by name, so that they were not compared; or empty.
    """

    mesh: Mesh
    verdicts: tuple[ValueVerdict, ...]
    first: Difference | None
    unmatched: str = ""

    @property
    def ok(self) -> bool:
        """Whether the parallel program is the same computation as the reference, within round-off."""
        return self.first is None

    def raise_if_wrong(self) -> None:
        """Raise AssertionError, with the report as its text, if the programs differ."""
        if self.first is not None:
            raise AssertionError(str(self))

    @property
    def layouts(self) -> dict[str, str]:
        """The learnt layout of each module's output and each parameter's gradient: name → "dp Shard(0), tp Partial"."""
        return {
            each.key.name: each.layout
            for each in self.verdicts
            if each.word == RIGHT and each.layout and each.key.phase in (FORWARD, "gradient") and not each.key.turn
        }

    def annotations(self) -> dict[str, dict[str, Any]]:
        """Return the learnt layouts of modules' outputs and of parameters as types of the package spmd_types: name →
        {"dp": S(0), "tp": R}. ModuleNotFoundError without the extra `types`."""
        return annotate_values(self.verdicts)

    def __str__(self) -> str:
        return "\n".join([self._headline(), *self._lines()])

    __repr__ = __str__

    def _headline(self) -> str:
        counts = Counter(each.word for each in self._listed_verdicts())
        mesh = ", ".join(f"{name}={size}" for name, size in zip(*self.mesh, strict=True))
        tally = ", ".join(f"{counts[word]} {word}" for word in (RIGHT, WRONG, UNKNOWN, ABSENT) if counts[word])
        unmatched = f" {self.unmatched}." if self.unmatched else ""
        if self.first is None:
            right = f"Right{' in what was compared' if unmatched else ''}: the ranks ({mesh}) compute what one process"
            return f"{right} computes, within round-off ({tally}).{unmatched}"
        return f"Wrong, first at {self.first}{unmatched}\n({mesh}: {tally})"

    def _listed_verdicts(self) -> list[ValueVerdict]:
        return [each for each in self.verdicts if each.key.phase != INPUT]

    def _lines(self) -> Iterator[str]:
        shown = self._listed_verdicts()
        width = max((len(_label(each)) for each in shown), default=0)
        wrong = [n for n, each in enumerate(shown) if each.word == WRONG]
        begin = max(0, wrong[0] - _MOST_LINES // 2) if wrong else 0
        for each in shown[begin : begin + _MOST_LINES]:
            yield f"  {_SIGNS[each.word]} {_label(each):{width}}  {_details(each)}".rstrip()
        if (left := len(shown) - len(shown[begin : begin + _MOST_LINES])) > 0:
            yield f"  … and {count_noun(left, 'value')} more: report.verdicts"


def _label(verdict: ValueVerdict) -> str:
    step = f"{verdict.key.turn}: " if verdict.key.turn else ""
    call = f" call {verdict.call}" if verdict.call is not None else ""
    part = f" {verdict.key.part}" if verdict.key.phase == STEP else verdict.key.part
    return f"{step}{verdict.key.phase:8} {verdict.key.name or '(model)'}{part}{call}".rstrip()


def _details(verdict: ValueVerdict) -> str:
    if verdict.word == WRONG:
        return f"error {verdict.error:.2g}, allowed {verdict.allowed:.2g}"
    return verdict.layout if verdict.word == RIGHT else verdict.word


def make_report(runs: Runs) -> CompareReport:
    """Judge all values of the runs, and explain the first difference."""
    verdicts = tuple(runs.judge_all())
    unmatched = describe_unmatched(runs.reference.catalog, runs.ranks.values())
    if all(each.word == ABSENT for each in verdicts if each.key.phase in (INITIAL, FORWARD)):
        raise CompareError(
            "the two models have no module and no parameter in common: their modules must have the same names. "
            f"{unmatched}"
        )
    _refuse_nan(verdicts)
    return CompareReport(runs.mesh, verdicts, _find_first(runs, verdicts), unmatched)


def _refuse_nan(verdicts: Sequence[ValueVerdict]) -> None:
    """Raise CompareError if the reference's loss or gradients are NaN, which equals nothing."""
    nan = [each for each in verdicts if math.isnan(each.norm)]
    if any(each.key.phase in (LOSS, GRADIENT) for each in nan):
        where = " ".join(_label(nan[0]).split())
        raise CompareError(
            f"the reference itself has NaN, first at {where}: nothing can be compared with that. Look at the "
            "step in one process first"
        )


def _find_first(runs: Runs, verdicts: Sequence[ValueVerdict]) -> Difference | None:
    judged = [n for n, each in enumerate(verdicts) if each.key.phase != INPUT]
    number = next((n for n in judged if verdicts[n].word == WRONG), None)
    masks = explain_masks(runs, verdicts)
    if number is None:
        if masks is None:
            return None
        return Difference(FORWARD, masks[0], masks[1], tuple(range(len(runs.ranks))), 0.0, 0.0)
    verdict = verdicts[number]
    summands = _find_summands(verdicts, number)
    if summands is not None and _are_added_up(summands, Evidence(runs, verdict, verdicts[:number], (), None)):
        summands = None
    if summands is None and (partial := _find_partial(verdicts, number)) is not None:
        verdict, number = verdicts[partial], partial
    evidence = Evidence(runs, verdict, verdicts[:number], verdicts[number + 1 :], summands)
    verdict.maps = map_errors(evidence)
    named = summands or find_reordered(evidence.earlier, verdict) or verdict
    return Difference(
        named.key.phase, named.key.name, explain(evidence), _wrong_ranks(runs, verdict), verdict.error,
        verdict.allowed, named.key.turn,
    )  # fmt: skip


def _find_summands(verdicts: Sequence[ValueVerdict], number: int) -> ValueVerdict | None:
    """Return the value before a wrong one that the ranks have in summands, if nobody has added these up."""
    wrong = verdicts[number]
    before = [each for each in reversed(verdicts[:number]) if each.word == RIGHT and each.fit is not None]
    if wrong.key.phase == FORWARD:
        return _find_forward_summands(wrong.key, before)
    if wrong.key.phase == BACKWARD:
        return _find_backward_summands(wrong.key, before)
    return None


def _are_added_up(summands: ValueVerdict, wrong: Evidence) -> bool:
    """Return whether ranks with different summands have the same wrong value: a reduction has been there."""
    names = dims_of_kind(summands, SUM)
    dims = [d for d, name in enumerate(wrong.held.mesh.names) if name in names]
    return len(dims) == len(names) and all(wrong.agree_along(d) for d in dims)


def _find_forward_summands(wrong: Key, before: Sequence[ValueVerdict]) -> ValueVerdict | None:
    """Right before it, or with nothing between but modules around it and beside it."""
    passed: list[Key] = []
    for each in before:
        if each.key.phase != FORWARD or each.key.turn != wrong.turn:
            continue
        if each.fit is not None and each.fit.layout.has_kind(SUM):
            parent = each.key.name.rpartition(".")[0]
            beside = all(_is_around(key, each.key) or key.name.rpartition(".")[0] == parent for key in passed)
            return each if beside else None
        passed.append(each.key)
    return None


def _find_backward_summands(wrong: Key, before: Sequence[ValueVerdict]) -> ValueVerdict | None:
    """The nearest gradient in summands of a value that the ranks have whole: it must be added up before it goes on."""
    for each in before:
        if each.key.phase == BACKWARD and each.key.turn == wrong.turn and (summed := dims_of_kind(each, SUM)):
            forward = each.key._replace(phase=FORWARD)
            output = next((other for other in before if other.key == forward), None)
            if output is not None and summed <= dims_of_kind(output, WHOLE):
                return each
    return None


def _find_partial(verdicts: Sequence[ValueVerdict], number: int) -> int | None:
    """Return the module right before a wrong one that some rank has in part, if its output does not fit: it is the
    first wrong one then, and not only another module."""
    for n in range(number - 1, -1, -1):
        each = verdicts[n]
        if each.key.phase == FORWARD == verdicts[number].key.phase and each.key.turn == verdicts[number].key.turn:
            return n if each.word == ABSENT and each.fit is not None else None
        if each.key.phase != INPUT:
            return None
    return None


def _is_around(outer: Key, inner: Key) -> bool:
    """Return whether a module contains another one, or is it."""
    return outer.name == "" or f"{inner.name}.".startswith(f"{outer.name}.")


def _wrong_ranks(runs: Runs, verdict: ValueVerdict) -> tuple[int, ...]:
    places = verdict.missing or verdict.places
    if verdict.fit is not None and not verdict.missing:
        bad = [place for place, error in verdict.fit.by_rank.items() if error > verdict.allowed]
        places = tuple(verdict.whole_places[place] for place in bad) or places
    return tuple(sorted(rank_number(runs.mesh.sizes, place) for place in places))
