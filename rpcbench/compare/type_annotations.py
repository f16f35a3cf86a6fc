"""The layouts that a comparison has learnt, in the words of spmd_types: R, I, V, P and S(dim) for each mesh dimension.

spmd_types (https://github.com/meta-pytorch/spmd_types) is an extra. A type there also says what the gradient is: of R
(replicate) each rank has a summand, of I (invariant) each has the whole.

Guarantees
- Values that are right get types, and parameters that begin with zeros, by their shapes; along dimensions of the mesh
  with several ranks.
- An output that is whole is I where its gradient is whole, too, and R elsewhere. A parameter that is whole is I where
  the output of its module is I; elsewhere its gradient, as backward leaves it, is a summand.
- S(dim) says that the pieces are in order, and that no other dimension of the mesh cuts the same one; else it is V.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from rpcbench.compare.capture import BACKWARD, FORWARD, INITIAL, Key
from rpcbench.compare.layouts import CUT, SUM, WHOLE, MeshShare
from rpcbench.compare.verdicts import RIGHT, UNKNOWN, ValueVerdict

Types = dict[str, Any]
"""By dimension of the mesh: a type of spmd_types."""
Shares = Mapping[str, MeshShare]
"""By dimension of the mesh."""
_IN_ORDER = ("", "as they are")  # ways to deal pieces that follow each other


def import_types() -> ModuleType:
    """Return the package spmd_types, with its checker. ModuleNotFoundError, which says what to install, without it."""
    try:
        importlib.import_module("spmd_types.checker")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "types of ranks need the package spmd_types here: pip install spmd_types", name=error.name
        ) from error
    return importlib.import_module("spmd_types")


def annotate_values(verdicts: Sequence[ValueVerdict]) -> dict[str, Types]:
    """Return the types of outputs of modules and of parameters, by name. A call stands for the others of its module."""
    library, known = import_types(), _collect_shares(verdicts)
    found: dict[str, Types] = {}
    for key, shares in known.items():
        if key.phase == FORWARD:
            gradient = known.get(key._replace(phase=BACKWARD), {})
            whole = {dim: dim in gradient and gradient[dim].kind == WHOLE for dim in shares}
            found.setdefault(key.name + key.part, _choose_types(library, shares, whole))
    for key, shares in known.items():
        if key.phase == INITIAL:
            output = found.get(key.name.rpartition(".")[0], {})
            whole = {dim: output.get(dim) is library.I for dim in shares}
            found[key.name] = _choose_types(library, shares, whole)
    return found


def _collect_shares(verdicts: Sequence[ValueVerdict]) -> dict[Key, Shares]:
    found: dict[Key, Shares] = {}
    for each in verdicts:
        has_layout = each.word == RIGHT or (each.word == UNKNOWN and each.key.phase == INITIAL)
        if has_layout and not each.key.turn and each.mesh is not None and each.fit is not None:
            along = zip(*each.mesh, each.fit.layout.shares, strict=True)
            found.setdefault(each.key, {name: share for name, size, share in along if size > 1})
    return found


def _choose_types(library: ModuleType, shares: Shares, whole_gradients: Mapping[str, bool]) -> Types:
    cuts = [share.dim for share in shares.values() if share.kind == CUT]
    found: Types = {}
    for name, share in shares.items():
        if share.kind == CUT:
            alone = cuts.count(share.dim) == 1 and share.deal in _IN_ORDER
            found[name] = library.S(share.dim) if alone else library.V
        elif share.kind == SUM:
            found[name] = library.P
        else:
            found[name] = library.I if whole_gradients[name] else library.R
    return found
