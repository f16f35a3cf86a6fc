"""Causes that lie in a module itself: an option, a norm over a piece, dropout.

Guarantees
- Each function takes the evidence, and returns a sentence, or None.
- An option is named where it is another one than the reference's and the values behind it are wrong. A size that is
  divided by a number of ranks is not: the module is cut.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rpcbench.compare.capture import FORWARD, INITIAL, INPUT, STEP, Catalog
from rpcbench.compare.compare_runs import Runs
from rpcbench.compare.evidence import Evidence, dims_of_kind, first_along, rank_words
from rpcbench.compare.layouts import CUT, WHOLE, Coordinate
from rpcbench.compare.masks import ATTENTION_DRAWS, DropMask
from rpcbench.compare.reductions import most_calls
from rpcbench.compare.verdicts import RIGHT, WRONG, ValueVerdict


# -- options
def has_other_option(evidence: Evidence) -> str | None:
    """An option of the module, or of the optimizer, is another one on some ranks."""
    key = evidence.verdict.key
    own = {each for module in evidence.runs.reference.catalog.modules.values() for each in module.parameters}
    if key.phase == FORWARD:
        inputs = (each for each in evidence.earlier if (each.key.phase, each.key.name) == (INPUT, key.name))
        if any(each.word == WRONG and each.key.turn == key.turn for each in inputs):
            return None
        return _explain_options(evidence, key.name, "module")
    if key.phase == STEP and key.name in own:
        return _explain_options(evidence, key.name, "optimizer")
    if key.phase == STEP:  # a buffer
        return _explain_options(evidence, key.name.rpartition(".")[0], "module")
    return None


def _explain_options(evidence: Evidence, name: str, owner: str) -> str | None:
    runs, turn = evidence.runs, evidence.verdict.key.turn
    wanted = runs.reference.catalog.options.get((turn, name), {})
    others: dict[tuple[str, str], list[Coordinate]] = {}
    own = {place: catalog.options.get((turn, name), {}) for place, catalog in runs.ranks.items()}
    for place, options in own.items():
        for option, word in options.items():
            if option not in wanted or word == wanted[option] or _is_cut_size(wanted[option], word, runs):
                continue
            if not _is_cut_unevenly(wanted[option], {at: each.get(option, "") for at, each in own.items()}, runs):
                others.setdefault((option, word), []).append(place)
    found = []
    for (option, word), places in others.items():
        alone = "" if len(places) == sum(map(bool, own.values())) else " alone"
        where = "all ranks" if len(places) == len(runs.ranks) else f"{rank_words(runs.mesh.sizes, places)}{alone}"
        found.append(f"{option} is {word} on {where}, and {wanted[option]} in the reference")
    if not found:
        return None
    all_alone = all(len(places) < sum(map(bool, own.values())) for places in others.values())
    mode = " (train() and eval() set it)" if any(option == "training" for option, _ in others) else ""
    drift = "the replicas have drifted apart: " if owner == "optimizer" and all_alone else ""
    return f"{drift}the {owner} has another option than in the reference: {'; '.join(found)}{mode}"


def _is_cut_size(wanted: str, word: str, runs: Runs) -> bool:
    """Return whether a number is that of the reference, divided by a number of ranks."""
    if not (wanted.isdigit() and word.isdigit()) or int(word) == 0:
        return False
    sizes = runs.mesh.sizes
    counts = {math.prod(each) for n in range(1, len(sizes) + 1) for each in itertools.combinations(sizes, n)} - {1}
    return any(-(-int(wanted) // count) == int(word) for count in counts)


def _is_cut_unevenly(wanted: str, words: Mapping[Coordinate, str], runs: Runs) -> bool:
    """Return whether the numbers of the ranks along a dimension of the mesh add up to that of the reference."""
    if not (wanted.isdigit() and all(map(str.isdigit, words.values()))):
        return False
    for d in range(len(runs.mesh.sizes)):
        sums: Counter[Coordinate] = Counter()
        for place, word in words.items():
            sums[place[:d] + place[d + 1 :]] += int(word)
        if {*sums.values()} == {int(wanted)}:
            return True
    return False


# -- dropout
def explain_masks(runs: Runs, verdicts: Sequence[ValueVerdict]) -> tuple[str, str] | None:
    """Return the first module whose dropout masks are wrong, and why: the chance of a mask must be the reference's;
    ranks with the same values must draw the same mask, ranks with other values other ones."""
    if (found := next(_find_other_chances(runs), None)) is not None:
        return found
    layouts = {
        each.key.name: each
        for each in verdicts
        if each.key.phase == FORWARD and each.word == RIGHT and each.fit is not None
    }
    names = dict.fromkeys(name for catalog in runs.ranks.values() for name in catalog.masks)
    for name in names:
        if (verdict := layouts.get(name)) is not None and (cause := _compare_masks(runs, name, verdict)) is not None:
            return name, cause
    return None


def _find_other_chances(runs: Runs) -> Iterator[tuple[str, str]]:
    """Yield the modules that drop more or less on some rank than in the reference, and why."""
    reference = runs.reference.catalog
    for name in sorted({*reference.masks}.union(*(catalog.masks for catalog in runs.ranks.values()))):
        wanted = _chances_of(reference, name)
        chances = {place: _chances_of(catalog, name) for place, catalog in runs.ranks.items()}
        bad = [place for place, each in chances.items() if None not in (each, wanted) and each != wanted]
        if bad:
            where = rank_words(runs.mesh.sizes, bad)
            yield name, (
                f"masks of dropout have another rate: {_write_chances(chances[bad[0]])} on {where}, "
                f"{_write_chances(wanted)} in the reference. An option differs, or one of the two is in eval()"
            )


def _chances_of(catalog: Catalog, name: str) -> set[float] | None:
    """Return the chances with which a module drops numbers; None if it is not called, or others around it or in it
    drop numbers for it."""
    if not any(key.phase == FORWARD and key.name == name for key in catalog.values):
        return None
    related = [each for each in catalog.masks if f"{each}.".startswith(f"{name}.") or f"{name}.".startswith(f"{each}.")]
    return None if {*related} - {name} else {mask.chance for mask in catalog.masks.get(name, ())}


def _write_chances(chances: set[float] | None) -> str:
    return " and ".join(f"{each:g}" for each in sorted(chances or ())) or "none at all"


def _compare_masks(runs: Runs, name: str, verdict: ValueVerdict) -> str | None:
    assert verdict.fit is not None and verdict.mesh is not None
    masks = {place: catalog.masks.get(name) for place, catalog in runs.ranks.items()}
    for d, share in enumerate(verdict.fit.layout.shares):
        along = verdict.mesh.names[d]
        whole = runs.mesh.names.index(along)
        for place, mask in masks.items():
            other = masks[first_along(place, whole)]
            if not place[whole] or mask is None or other is None:
                continue
            if share.kind == WHOLE and mask != other:
                return (
                    f"ranks along {along} have the same values, and different random dropout masks: give them the same "
                    "seed there"
                )
            if share.kind == CUT and mask == other and not _is_drawn_whole(runs, name, mask):
                return (
                    f"ranks along {along} have different values, and the same random dropout mask: give each its own "
                    "seed"
                )
    return None


def _is_drawn_whole(runs: Runs, name: str, masks: Sequence[DropMask]) -> bool:
    """Return whether a rank draws the masks of the reference, of which it then takes its piece."""
    wanted = {each.shape for each in runs.reference.catalog.masks.get(name, ())} - {(ATTENTION_DRAWS,)}
    return {each.shape for each in masks} <= wanted


# -- norms
def is_batch_norm(evidence: Evidence) -> str | None:
    if "BatchNorm" not in evidence.kind or evidence.verdict.key.phase != FORWARD:
        return None
    given = evidence.verdict.key._replace(phase=INPUT, part="[0][0]")
    is_cut = any(dims_of_kind(each, CUT) for each in evidence.earlier if each.key == given)
    if not is_cut and most_calls(evidence) < 2:
        return None  # all ranks have all rows
    return (
        "each rank or micro-batch normalizes by the mean and the variance of its own rows, and the reference by those "
        "of the whole batch: use SyncBatchNorm, or a norm without statistics of the batch"
    )


def is_group_norm(evidence: Evidence) -> str | None:
    names = evidence.runs.reference.catalog.modules.get(evidence.verdict.key.name)
    starts = [
        each for each in evidence.earlier if names and each.key.phase == INITIAL and each.key.name in names.parameters
    ]
    if evidence.kind != "GroupNorm" or evidence.verdict.key.phase != FORWARD:
        return None
    if not (along := set().union(*(dims_of_kind(each, CUT) for each in starts))):
        return None
    return (
        f"the channels are cut along {' and '.join(sorted(along))}, and each rank makes groups of its own: give it "
        "whole ones, and divide num_groups by the number of ranks"
    )


def is_layer_norm(evidence: Evidence) -> str | None:
    key, kind = evidence.verdict.key, evidence.kind
    inputs = [each for each in evidence.earlier if each.key == key._replace(phase=INPUT, part=each.key.part)]
    cut = [each for each in inputs if each.word == RIGHT and each.fit is not None and each.fit.layout.has_kind(CUT)]
    if key.phase != FORWARD or not kind.endswith(("LayerNorm", "RMSNorm")) or not cut or cut[0].fit is None:
        return None
    if all(share.dim != len(cut[0].shape) - 1 for share in cut[0].fit.layout.shares):
        return None
    return (
        "each rank has a piece of every row, and the row is not normalized as a whole: add up what its mean and its "
        "variance are made of over the ranks, in forward and in backward"
    )


