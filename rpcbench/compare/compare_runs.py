"""Compares the captured runs of all ranks with the captured run of one process, value by value.

Guarantees
- One value of the reference, and the ranks' values of it, are in memory at a time.
- The order is that of the reference: initial values, forward, loss, backward, gradients, step, turn by turn.
- A module that a rank has without some of its parts (the whole model, on a stage of a pipeline) is another module: its
  values are judged right where they fit, and never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rpcbench.compare.allowances import allowed_error, coarser_type
from rpcbench.compare.capture import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    INITIAL,
    INPUT,
    LOSS,
    PHASES,
    STEP,
    Capture,
    Catalog,
    Kept,
    Key,
)
from rpcbench.compare.layouts import CUT, SUM, Coordinate, find_layouts, indices_of, norm_of, select_indices
from rpcbench.compare.names import renumber_modules
from rpcbench.compare.verdicts import ABSENT, ANY, RIGHT, WRONG, Mesh, ValueVerdict, judge_value

RECURRENT = ("RNN", "LSTM", "GRU")
"""Classes of modules whose outputs are "[0]", of all times, and "[1]", the state after the last one."""
ReadValue = Callable[[Coordinate, Kept], Tensor]
"""Reads a value that the rank at a coordinate has kept."""
Calls = Mapping[int, Kept]
"""The values of one key, by number of the call."""


Values = dict[Coordinate, Tensor]
"""The ranks' values of one key, by coordinate; several calls are joined along their first dimension."""


class CallSlots(NamedTuple):
    """Which of the reference's calls of a module a rank makes, once or several times for each of its micro-batches."""

    first: int
    own: int  # for each micro-batch

    def select(self, calls: Calls, call: int) -> list[int]:
        """Return the numbers of the rank's calls that are, together, one of the reference's."""
        place = call - self.first
        return sorted(calls)[place :: self.own] if 0 <= place < self.own else []


@dataclass
class Runs:
    """The runs to compare: one in one process, and the same on each rank."""

    reference: Capture
    movements: Mapping[Key, Mapping[int, Sequence[float]]]  # what round-off does to each value, see `allowances`
    mesh: Mesh
    ranks: dict[Coordinate, Catalog]
    read_value: ReadValue
    factors: dict[int, float] = field(default_factory=dict)  # turn → scale of the ranks' losses in its backward pass
    _slots: dict[Key, dict[Coordinate, CallSlots]] = field(default_factory=dict)  # of keys that are judged by these
    _runs: dict[int, tuple[int, dict[Coordinate, int]]] = field(default_factory=dict)  # turn → calls of the model
    _last_places: dict[int, set[Coordinate]] = field(default_factory=dict)  # turn → ranks with the end of a sequence

    def judge_all(self) -> list[ValueVerdict]:
        """Return the verdict on each value of the reference, in the order of execution."""
        verdicts = list(self._judge_keys())
        right = {each.key for each in verdicts if each.word == RIGHT and each.key.phase == STEP}
        for each in verdicts:
            # A program that steps by hand may keep its gradients elsewhere, as in a flat buffer: the parameters tell.
            if each.key.phase == GRADIENT and each.word == WRONG and self._is_by_hand(each.key):
                step = each.key._replace(phase=STEP)
                if each.missing or step in right or (self._are_equal(step) and not self._are_equal(each.key)):
                    each.word, each.fit, each.error = ABSENT, None, 0.0
        return verdicts

    def _are_equal(self, key: Key) -> bool:
        """Return whether all ranks that have a value have the same."""
        first, *others = self.read_values(key, None).values()
        return all(torch.equal(first, each) for each in others)

    def _is_by_hand(self, key: Key) -> bool:
        """Return whether no optimizer has stepped the model's own parameters on any rank, and they have changed."""
        return all(
            catalog.updates.get(key.turn) == 0 and key._replace(phase=STEP) in catalog.values
            for catalog in self.ranks.values()
            if Key(0, INITIAL, key.name) in catalog.values
        )

    def _judge_keys(self) -> Iterator[ValueVerdict]:
        renumber_modules(self.reference.catalog, self.ranks, self.mesh.sizes, self._has_equal_start)
        order = {phase: n for n, phase in enumerate(PHASES)}
        order[INPUT] = order[FORWARD]
        for key in sorted(self.reference.catalog.values, key=lambda key: (key.turn, order[key.phase])):  # stable
            yield from self._judge_key(key)

    def read_whole(self, key: Key, call: int | None) -> Tensor:
        """Return a value of the reference; `call`: its place among the calls; None: all, joined."""
        own = self.reference.catalog.values[key]
        return _join([self.reference.spool.read_tensor(own[n].stored) for n in _select_calls(own, call)])

    def read_values(self, key: Key, call: int | None) -> Values:
        """Return the values of the ranks that have it."""
        found: Values = {}
        slots = self._slots.get(key) if call is not None else None
        for place, catalog in self.ranks.items():
            calls = catalog.values.get(key, {})
            numbers = slots[place].select(calls, call) if slots and call is not None else _select_calls(calls, call)
            if kept := [calls[n] for n in numbers]:
                if not _is_joinable(kept):
                    return {}
                found[place] = _join([self.read_value(place, each) for each in kept])
        return found

    def _find_slots(self, key: Key) -> Iterator[dict[Coordinate, CallSlots]]:
        """Yield which calls of the reference each rank's calls may belong to, where a model calls a module several
        times and the ranks call the model for each micro-batch, or have some of these calls only."""
        own = len(self.reference.catalog.values[key])
        counts = {place: len(catalog.values.get(key, ())) for place, catalog in self.ranks.items()}
        alone, runs = self._count_runs(key.turn)
        if own < 2 or alone != 1 or any(not runs[place] or count % runs[place] for place, count in counts.items()):
            return
        each = {place: count // runs[place] for place, count in counts.items()}
        if {*each.values()} == {own}:
            yield {place: CallSlots(0, own) for place in each}
            return
        for d, size in enumerate(self.mesh.sizes):
            along = [{count for place, count in each.items() if place[d] == n} for n in range(size)]
            if all(len(found) == 1 for found in along) and sum(max(found) for found in along) == own:
                begins = [sum(max(found) for found in along[:n]) for n in range(size)]
                yield {place: CallSlots(begins[place[d]], count) for place, count in each.items()}

    def _count_runs(self, turn: int) -> tuple[int, dict[Coordinate, int]]:
        """Return how often the reference, and each rank, has called the model itself in a step."""
        if turn not in self._runs:
            ranks = {place: _count_calls(catalog, turn) for place, catalog in self.ranks.items()}
            self._runs[turn] = _count_calls(self.reference.catalog, turn), ranks
        return self._runs[turn]

    def _has_equal_start(self, key: Key, names: Mapping[Coordinate, Key]) -> bool:
        whole = self.read_whole(key, None)
        values = {place: self.read_value(place, self.ranks[place].values[own][0]) for place, own in names.items()}
        allowed = self._allowed_error(key, None, whole, values)
        return judge_value(key, None, whole, self.mesh, values, allowed).word == RIGHT

    def _judge_key(self, key: Key) -> Iterator[ValueVerdict]:
        own = self.reference.catalog.values[key]
        counts = {len(calls) for catalog in self.ranks.values() if (calls := catalog.values.get(key))}
        is_joinable = _is_joinable(own.values())
        has_parts = not is_joinable or max(self._count_runs(key.turn)[1].values()) > 1
        for slots in self._find_slots(key) if has_parts or not counts <= {len(own)} else ():
            self._slots[key] = slots
            by_call = [self._judge_call(key, call) for call in range(len(own))]
            if all(each.word != WRONG for each in by_call):
                yield from by_call
                return
        if key in self._slots and has_parts:
            yield from by_call
            return
        self._slots.pop(key, None)
        is_by_call = len(own) > 1 and counts <= {len(own)}
        if not is_by_call and not is_joinable:  # the ranks make other calls, and of these no pieces
            yield self._judge_values(key, 0, self.read_whole(key, 0), {})
            return
        for call in range(len(own)) if is_by_call else [None]:
            yield self._judge_call(key, call)

    def _judge_call(self, key: Key, call: int | None) -> ValueVerdict:
        whole, values = self.read_whole(key, call), self.read_values(key, call)
        verdict = self._judge_values(key, call, whole, values)
        for read_otherwise in (
            self._read_repeated, self._read_in_turn, self._read_other_dim, self._read_last_state, self._read_output
        ):  # fmt: skip
            if verdict.word == WRONG and (others := read_otherwise(key, call)) is not None:
                again = self._judge_values(key, call, whole, others)
                verdict = again if again.word == RIGHT else verdict
        if verdict.word == WRONG and self._is_right_where_called(verdict, whole, values):
            verdict.word, verdict.layout = RIGHT, "its pieces, on the ranks that call it"
            verdict.fit, verdict.error = None, 0.0
        if key.phase == BACKWARD and verdict.fit is not None and verdict.word == RIGHT and whole.dim():
            self.factors.setdefault(key.turn, verdict.factor)
        if verdict.word == WRONG and key.phase != LOSS and key.name in self.partial_modules:
            verdict.word = ABSENT
        self._note_missing_ranks(verdict)
        return verdict

    def _judge_values(self, key: Key, call: int | None, whole: Tensor, values: Values) -> ValueVerdict:
        allowed, factor = self._allowed_error(key, call, whole, values), self._factor_of(key, whole)
        return judge_value(key, call, whole, self.mesh, values, allowed, factor, self._claimed_kinds(key))

    def _read_repeated(self, key: Key, call: int | None) -> Values | None:
        """Return the values of calls that are no pieces of the reference's call, but each the same as that: a table of
        positions, read by each micro-batch. Their gradients add up. None if the calls are not so."""
        found: Values = {}
        for place, catalog in self.ranks.items():
            if not (kept := catalog.values.get(key)):
                continue
            calls = [self.read_value(place, each) for each in kept.values()]
            if len(calls) < 2 or any(value.shape != calls[0].shape for value in calls):
                return None
            if key.phase == BACKWARD:
                found[place] = torch.stack(calls).sum(0)
            elif all(torch.equal(value, calls[0]) for value in calls):
                found[place] = calls[0]
        return found or None

    def _read_in_turn(self, key: Key, call: int | None) -> Values | None:
        """Return the values of replicas of a pipeline, which get micro-batches of any sizes in turn, as if one rank had
        run all of these: numbers of calls are those of micro-batches. None if the ranks' calls are not so."""
        places = [place for place, catalog in self.ranks.items() if catalog.values.get(key)]
        calls = [(n, place, kept) for place in places for n, kept in self.ranks[place].values[key].items()]
        if len(places) < 2 or len({n for n, _, _ in calls}) < len(calls):
            return None
        if len({kept.stored.shape[1:] for _, _, kept in calls}) > 1:
            return None
        calls.sort(key=lambda call: call[0])
        return {places[0]: _join([self.read_value(place, kept) for _, place, kept in calls])}

    def _read_other_dim(self, key: Key, call: int | None) -> Values | None:
        """Return the values of calls joined along the dimension of the rows where that is not the first one, as in the
        state of a recurrent module. None if the shapes are not so."""
        whole = self.reference.catalog.values[key][0].stored.shape
        found: Values = {}
        for place, catalog in self.ranks.items():
            calls = [self.read_value(place, each) for each in catalog.values.get(key, {}).values()]
            if not calls:
                continue
            if len(calls) < 2 or len(whole) < 2 or any(each.shape[:1] != whole[:1] for each in calls):
                return None
            if len({(each.dim(), each.shape[2:]) for each in calls}) > 1:
                return None
            found[place] = torch.cat(calls, 1)
        return found or None

    def _read_output(self, key: Key, call: int | None) -> Values | None:
        """Return the values of the ranks whose model returns what the reference's does, where others return a value of
        another shape, with which something else goes on. None if all are alike."""
        if key.name or key.phase not in (FORWARD, BACKWARD):
            return None
        whole, values = self.read_whole(key, call), self.read_values(key, call)
        found = {place: value for place, value in values.items() if value.shape == whole.shape}
        return found if 0 < len(found) < len(values) else None

    def _read_last_state(self, key: Key, call: int | None) -> Values | None:
        """Return the values of the ranks that have the last piece of a sequence, where a recurrent module has read it:
        its last state, and what is made of that, is there; others have the states between the pieces. None if no
        sequence is so cut."""
        if key.phase not in (FORWARD, BACKWARD):
            return None
        output = key._replace(phase=FORWARD, part="[0]")
        if self.reference.catalog.modules[key.name].kind in RECURRENT and key.part.startswith("[1]"):
            self._last_places[key.turn] = self._find_last_places(output, call)
        last = self._last_places.get(key.turn)
        return {place: value for place, value in self.read_values(key, call).items() if place in last} if last else None

    def _find_last_places(self, key: Key, call: int | None) -> set[Coordinate]:
        """Return the ranks that have the last times of a recurrent module's output; none if these are not cut."""
        if key not in self.reference.catalog.values:
            return set()
        found = self._judge_values(key, call, self.read_whole(key, call), self.read_values(key, call))
        if found.word != RIGHT or found.fit is None or found.mesh is None:
            return set()
        options = self.reference.catalog.options[key.turn, key.name]
        time = 1 if options["batch_first"] == "True" and len(found.shape) == 3 else 0
        cuts = [d for d, share in enumerate(found.fit.layout.shares) if share.kind == CUT and share.dim == time]
        last = {own for own in found.whole_places if cuts and all(own[d] == found.mesh.sizes[d] - 1 for d in cuts)}
        return {found.whole_places[own] for own in last}

    def _is_right_where_called(self, verdict: ValueVerdict, whole: Tensor, values: Values) -> bool:
        """Return whether some ranks do not call a module that they have, as where none of their rows needs it, and the
        others have their pieces of the reference's value."""
        key = verdict.key
        _, runs = self._count_runs(key.turn)
        ranks = ((place, catalog.modules) for place, catalog in self.ranks.items() if place not in values)
        idle = {place for place, modules in ranks if key.name in modules and runs[place]}
        scale = self.factors.get(key.turn, 1.0) if key.phase == BACKWARD else 1.0
        if key.phase not in (INPUT, FORWARD, BACKWARD) or not idle or not values or {*values} | idle != {*self.ranks}:
            return False
        shapes = dict.fromkeys(self.ranks, tuple(next(iter(values.values())).shape))
        if any(tuple(value.shape) != shapes[place] for place, value in values.items()):
            return False
        for layout in find_layouts(whole.shape, shapes, self.mesh.sizes):
            pieces = {
                place: select_indices(whole, indices_of(whole.shape, shapes, self.mesh.sizes, layout, place))
                for place in values
            }
            if layout.has_kind(CUT) and not layout.has_kind(SUM) and all(
                piece.shape == values[place].shape and norm_of(values[place] / scale - piece) <= verdict.allowed
                for place, piece in pieces.items()
            ):  # fmt: skip
                return True
        return False

    def _allowed_error(self, key: Key, call: int | None, whole: Tensor, values: Mapping[Coordinate, Tensor]) -> float:
        moved = [self.movements[key][n] for n in _select_calls(self.movements[key], call)]
        dtype = whole.dtype
        for value in values.values() if key.phase != INITIAL else ():  # parameters have the type that they begin with
            dtype = coarser_type(dtype, value.dtype)
        movements = [math.hypot(*each) for each in zip(*moved, strict=True)]
        return allowed_error(movements, norm_of(whole), whole.numel(), dtype)

    def _factor_of(self, key: Key, whole: Tensor) -> float:
        """Return the scale that a rank's gradients have. Its loss may be that of its own rows, or be scaled for a
        type with few digits; the first gradient of a backward pass shows by how much: until then it is `ANY`. The
        gradient of a single number, a term of the loss, has a factor of its own, and does not show it."""
        if key.phase != BACKWARD:
            return 1.0
        return self.factors.get(key.turn, ANY) if whole.dim() else ANY

    def _claimed_kinds(self, key: Key) -> set[str]:
        kept = (kept for catalog in self.ranks.values() for kept in catalog.values.get(key, {}).values())
        return {placement.partition("(")[0] for each in kept for _, placement in each.placements or ()}

    @cached_property
    def partial_modules(self) -> set[str]:
        """Modules that some rank has without a part of them."""
        found = set()
        for catalog in self.ranks.values():
            for missing in self.reference.catalog.modules.keys() - catalog.modules.keys():
                while "." in missing:
                    missing = missing.rpartition(".")[0]
                    found.add(missing)
                found.add("")
        return found

    def _note_missing_ranks(self, verdict: ValueVerdict) -> None:
        """A gradient, and a parameter after a step, are missing where a rank has the parameter and lacks them."""
        key = verdict.key
        if key.phase in (GRADIENT, STEP) and not key.part:
            initial = Key(0, INITIAL, key.name)
            has_parameter = {place for place, catalog in self.ranks.items() if initial in catalog.values}
            if missing := has_parameter - {*verdict.places}:
                verdict.word, verdict.missing, verdict.error = WRONG, tuple(sorted(missing)), math.inf


def _count_calls(catalog: Catalog, turn: int) -> int:
    """Return how often a run has called the model itself in a step."""
    calls = (own for key, own in catalog.values.items() if (key.turn, key.phase, key.name) == (turn, FORWARD, ""))
    return max(map(len, calls), default=0)


def _select_calls(calls: Mapping[int, object], call: int | None) -> list[int]:
    """Return the numbers of all calls, or of the one at a place in their order."""
    return sorted(calls) if call is None else sorted(calls)[call : call + 1]


def _is_joinable(calls: Collection[Kept]) -> bool:
    """Return whether calls have the same shape but for their first dimension."""
    return len({tuple(each.stored.shape)[1:] for each in calls}) <= 1


def _join(calls: Sequence[Tensor]) -> Tensor:
    return calls[0] if len(calls) == 1 else torch.cat([each.reshape(1) if not each.dim() else each for each in calls])
