"""The rules by which operators propagate names: one small function each, from a call to the names of its result.

Rules
- Each docstring states the names of the result. A rule runs before its operator, so a mismatch has changed nothing.
  Sizes are checked by torch.
- Layers: the names of the weights determine the names of input and output; weights without names leave them open. A
  dimension that a layer creates has the name of the weight's dimension, so it has none if the weight has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rpcbench.named.dimnames import (
    Names,
    NamesError,
    check_unique,
    dimension_index,
    format_named_shape,
    format_names,
    unify_names,
)


class NameRule(Enum):
    """How the names of a result are determined."""

    KEEPS = "those of the input"
    UNIFIES = "those of all inputs, compared from the right"
    CONTRACTS = "those of the dimensions that are not summed over"
    REMOVES = "those of the dimensions that are left"
    PERMUTES = "they move with their dimensions"
    FACTORY = "those given as names="
    NONE = "the result has no names, or is no tensor; what is filled in place keeps its own"
    OWN = "the operator's own rule"


@dataclass(frozen=True, slots=True)
class Row:
    """One operator. `infer` returns the names of its result; None: the result is left unchanged."""

    name: str
    rule: NameRule
    infer: Callable[[OperatorCall], Names] | None
    dims: tuple[tuple[int, str], ...] = ()  # arguments that are dimensions: position and keyword
    keepdim: int = 0  # position of that argument; 0 where there is none
    default: int | None = None  # the dimension if none is given; None: all
    documented: bool = True  # whether it has a row in torch's documentation

    @property
    def is_inplace(self) -> bool:
        if self.name.endswith("__"):  # an operator sign; only += and its like, not __invert__
            return self.name.startswith("__i") and self.rule is NameRule.UNIFIES
        return self.name.endswith("_")


def names_of(tensor: torch.Tensor) -> Names:
    """Return the names of a tensor's dimensions; all None for a plain tensor."""
    names: Names | None = getattr(tensor, "_dim_names", None)
    return (None,) * tensor.dim() if names is None else names


class OperatorCall:
    """One call of an operator. Argument 0 is always positional; dimensions are indices after `resolve_dims`."""

    __slots__ = ("args", "kwargs", "row")

    def __init__(self, row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args:
            first = next((key for key in ("condition", "query", "input", "self", "tensors") if key in kwargs), None)
            if first is not None:
                kwargs = dict(kwargs)
                args = (kwargs.pop(first),)
        self.row, self.args, self.kwargs = row, args, kwargs

    def resolve_dims(self) -> None:
        """Replace names of dimensions by indices."""
        names = names_of(self.args[0] if isinstance(self.args[0], torch.Tensor) else self.args[0][0])
        for place, keyword in self.row.dims:
            given = self.argument_at(place, keyword)
            if not isinstance(given, str | list | tuple):
                continue
            if len(self.args) > place:
                self.args = (*self.args[:place], dimension_index(given, names), *self.args[place + 1 :])
            else:
                self.kwargs = {**self.kwargs, keyword: dimension_index(given, names)}

    def argument_at(self, place: int, keyword: str, default: Any = None) -> Any:
        """Return an argument given by position or keyword."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(keyword, default)

    def tensor_names(self, place: int = 0, keyword: str = "") -> Names:
        """Return the names of the tensor at that position."""
        return names_of(self.argument_at(place, keyword))

    def dim_argument(self, which: int = 0) -> Any:
        """Return the dimension, or dimensions, of the call; None for all."""
        place, keyword = self.row.dims[which]
        return self.argument_at(place, keyword, self.row.default)

    def has_keepdim(self) -> bool:
        """Return whether dimensions that are summed over stay, with size 1."""
        place = self.row.keepdim
        return bool(place) and bool(self.argument_at(place, "keepdim", False))

    def tensor_arguments(self) -> Iterator[torch.Tensor]:
        """Yield the tensor arguments in order, also those in lists; not `out`."""
        for value in (*self.args, *(value for key, value in self.kwargs.items() if key != "out")):
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from (each for each in value if isinstance(each, torch.Tensor))

    def format_tensors(self) -> str:
        """Return the tensors as text, for errors."""
        return " and ".join(format_tensor(tensor) for tensor in self.tensor_arguments())


def format_tensor(tensor: torch.Tensor) -> str:
    """Return a tensor as text: `(N=32, C=3)`."""
    names = names_of(tensor)
    return format_named_shape(names, tensor.shape) if len(names) == tensor.dim() else format_names(names)


def linear_names(call: OperatorCall) -> Names:
    """(…, in) with a weight (out, in) gives (…, out)."""
    names, weight = call.tensor_names(), call.tensor_names(1, "weight")
    _check_same(names[-1], weight[-1], "the last dimension of the input", "the weight's")
    made, bias = (*names[:-1], *weight[:-1]), call.argument_at(2, "bias")
    return check_unique(made if bias is None else unify_names(made, names_of(bias)))


def convolution_names(call: OperatorCall) -> Names:
    """(…, in, *places) with a weight (out, in, *window) gives (…, out, *places)."""
    names, weight = call.tensor_names(), call.tensor_names(1, "weight")
    channel = len(names) - len(weight) + 1  # an input may have no batch dimension
    _check_same(names[channel], weight[1], "the channels of the input", "the weight's")
    made = check_unique((*names[:channel], weight[0], *names[channel + 1 :]))
    bias = call.argument_at(2, "bias")
    if bias is not None:
        _check_same(weight[0], names_of(bias)[0], "the channels that the weight makes", "the bias's")
    return made


def layer_norm_names(call: OperatorCall) -> Names:
    """Return the input's names, unified with those of the weight and bias at the right."""
    names = call.tensor_names()
    for place, keyword in ((2, "weight"), (3, "bias")):
        if isinstance(part := call.argument_at(place, keyword), Tensor):
            names = unify_names(names, names_of(part))
    return names


def channel_norm_names(call: OperatorCall) -> Names:
    """Return the input's names; the name of the channels must be the weight's."""
    names, weight = call.tensor_names(), call.argument_at(2 if call.row.name == "group_norm" else 3, "weight")
    if weight is not None:
        _check_same(names[1], names_of(weight)[0], "the channels of the input", "the weight's")
    return names


def einsum_names(call: OperatorCall) -> Names:
    """Return the names of the result's letters; dimensions with one letter must have one name."""
    inputs, arrow, output = str(call.args[0]).replace(" ", "").partition("->")
    operands = call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]
    if "." in inputs:  # an ellipsis
        raise NamesError(f"the equation {call.args[0]!r} has dimensions without a letter: write out all of them")
    known: dict[str, str | None] = {}
    for letters, operand in zip(inputs.split(","), operands, strict=True):
        for letter, name in zip(letters, names_of(operand), strict=True):
            _check_same(known.get(letter), name, f"a dimension {letter!r}", "another")
            known[letter] = known.get(letter) or name  # a name from any operand
    left = sorted(letter for letter in known if inputs.count(letter) == 1)  # torch's order without an arrow
    return check_unique(tuple(known[letter] for letter in (output if arrow else left)))


def embedding_names(call: OperatorCall) -> Names:
    """(…) of a table (rows, width) gives (…, width)."""
    return check_unique((*call.tensor_names(), call.tensor_names(1, "weight")[-1]))


def attention_names(call: OperatorCall) -> Names:
    """(…, to, e), (…, from, e), (…, from, v) give (…, to, v)."""
    query, key, value = call.tensor_names(), call.tensor_names(1, "key"), call.tensor_names(2, "value")
    _check_same(query[-1], key[-1], "the last dimension of the query", "the key's")
    _check_same(key[-2], value[-2], "the positions of the key", "the value's")
    batch: Names = (*query[:-2], None, None)  # aligned from the right, past the last two
    for other in (key, value):
        batch = unify_names(batch, (*other[:-2], None, None))
    return check_unique((*batch[:-2], query[-2], value[-1]))


def loss_names(call: OperatorCall) -> Names:
    """Return the unified names of input and target, or none for a mean or sum of the losses."""
    names = unify_names(call.tensor_names(), call.tensor_names(1, "target"))
    return names if call.kwargs.get("reduction") == "none" else ()


def class_loss_names(call: OperatorCall) -> Names:
    """Return the input's names without the classes; the target has these, or all if it holds probabilities."""
    names, target = call.tensor_names(), call.tensor_names(1, "target")
    classes = min(1, len(names) - 1)  # dimension 0 for a single sample
    without = (*names[:classes], *names[classes + 1 :])
    unify_names(names if len(target) == len(names) else without, target)
    return without if call.kwargs.get("reduction") == "none" else ()


def _check_same(one: str | None, other: str | None, first: str, second: str) -> None:
    """Raise NamesError if both have a name and these differ."""
    if one is not None and other is not None and one != other:
        raise NamesError(f"{first} is {one!r} and {second} {other!r}")


def input_names(call: OperatorCall) -> Names:
    """Return the input's names."""
    return call.tensor_names()


def expanded_names(call: OperatorCall) -> Names:
    """Return the input's names, after the new dimensions."""
    sizes = call.argument_at(1, "size")
    count = len(sizes) if isinstance(sizes, list | tuple) else len(call.args) - 1
    return (None,) * (count - len(call.tensor_names())) + call.tensor_names()


def unified_names(call: OperatorCall) -> Names:
    """Return the unified names of all tensors."""
    return reduce(unify_names, map(names_of, call.tensor_arguments()))


def where_names(call: OperatorCall) -> Names:
    """Return the unified names of all tensors; a condition alone gives indices, with a dimension without a name."""
    return (None,) if len(call.args) + len(call.kwargs) == 1 else unified_names(call)


def concatenated_names(call: OperatorCall) -> Names:
    """Return the unified names of all tensors in the list; an empty tensor of one dimension fits all, as in torch."""
    return _unify_all([names_of(each) for each in call.args[0] if each.dim() != 1 or each.numel()])


def _unify_all(all_names: list[Names]) -> Names:
    return reduce(unify_names, all_names) if all_names else (None,)


def stacked_names(call: OperatorCall) -> Names:
    """Return the unified names of all tensors, and a new dimension without a name."""
    return _with_new(_unify_all([names_of(each) for each in call.args[0]]), call.argument_at(1, "dim", 0))


def unsqueezed_names(call: OperatorCall) -> Names:
    """Return the input's names, and a new dimension without a name."""
    return _with_new(call.tensor_names(), call.argument_at(1, "dim"))


def _with_new(names: Names, dim: int) -> Names:
    place = dim + len(names) + 1 if dim < 0 else dim  # counted in the result
    return (*names[:place], None, *names[place:])


def matrix_product_names(call: OperatorCall) -> Names:
    """(n, d) by (d, m) gives (n, m)."""
    return check_unique((call.tensor_names()[-2], call.tensor_names(1, "mat2")[-1]))


def matrix_vector_names(call: OperatorCall) -> Names:
    """(n, d) by (d) gives (n)."""
    return call.tensor_names()[:-1]


def batched_product_names(call: OperatorCall) -> Names:
    """As `matrix_product_names`, for vectors and batches of matrices too; the batch dimensions unify."""
    return _product_names(call.tensor_names(), call.tensor_names(1, "mat2" if "mat2" in call.kwargs else "other"))


def reversed_product_names(call: OperatorCall) -> Names:
    """As `batched_product_names`, with the second argument first."""
    return _product_names(call.tensor_names(1, "other"), call.tensor_names())


def _product_names(first: Names, second: Names) -> Names:
    if len(second) == 1:  # by a vector
        return first[:-1]
    if len(first) == 1:  # vector by matrices
        return second[:-2] + second[-1:]
    batch = unify_names((*first[:-2], None, None), (*second[:-2], None, None))[:-2]
    return check_unique((*batch, first[-2], second[-1]))


def added_product_names(call: OperatorCall) -> Names:
    """As `matrix_product_names`, unified with the names of the added tensor."""
    return unify_names(
        call.tensor_names(), check_unique((call.tensor_names(1, "mat1")[-2], call.tensor_names(2, "mat2")[-1]))
    )


def added_vector_names(call: OperatorCall) -> Names:
    """As `matrix_vector_names`, unified with the names of the added tensor."""
    return unify_names(call.tensor_names(), call.tensor_names(1, "mat")[:-1])


def reduction_names(call: OperatorCall) -> Names:
    """Return the names of the remaining dimensions."""
    names, dims = call.tensor_names(), call.dim_argument()
    if call.has_keepdim():
        return names
    # No dimension given, as sum(), std(True) or sum(dim=()): all are removed.
    if dims is None or isinstance(dims, bool) or (not isinstance(dims, int) and not dims):
        return ()
    return _remaining_names(names, dims)


def extremum_names(call: OperatorCall) -> Names:
    """As `unified_names` for two tensors, else as `reduction_names`."""
    return unified_names(call) if isinstance(call.argument_at(1, "other"), torch.Tensor) else reduction_names(call)


def _remaining_names(names: Names, dims: Any) -> Names:
    """Return the names of all other dimensions."""
    gone = {dim % max(len(names), 1) for dim in (dims if isinstance(dims, list | tuple) else (dims,))}
    return tuple(name for place, name in enumerate(names) if place not in gone)


def squeezed_names(call: OperatorCall) -> Names:
    """Return the input's names without the dimensions of size 1, or without those given that have size 1."""
    names, shape, dims = call.tensor_names(), call.args[0].shape, call.dim_argument()
    if not names:
        return names
    wanted = range(len(names)) if dims is None else dims if isinstance(dims, list | tuple) else (dims,)
    return _remaining_names(names, [dim for dim in wanted if shape[dim] == 1])


def transposed_names(call: OperatorCall) -> Names:
    """Return the input's names, two of them exchanged."""
    names = list(call.tensor_names())
    one, other = call.dim_argument(0), call.dim_argument(1)
    if names:
        names[one], names[other] = names[other], names[one]
    return tuple(names)


def reversed_names(call: OperatorCall) -> Names:
    """Return the input's names from right to left."""
    return call.tensor_names()[::-1]


def matrix_transpose_names(call: OperatorCall) -> Names:
    """Return the input's names, the last two exchanged."""
    names = call.tensor_names()
    return (*names[:-2], *names[:-3:-1])


def permuted_names(call: OperatorCall) -> Names:
    """Return the input's names in the given order."""
    names, dims = call.tensor_names(), call.dim_argument()
    return tuple(names[dim] for dim in (call.args[1:] if isinstance(dims, int) else dims))


def masked_select_names(call: OperatorCall) -> Names:
    """Return one dimension without a name, for the selected elements; the mask must fit the input."""
    unify_names(call.tensor_names(), call.tensor_names(1, "mask"))
    return (None,)


def same_shape_names(call: OperatorCall) -> Names:
    """Return the input's names, for a resize or view that changes no size; NamesError for any other."""
    given = call.argument_at(1, "size", call.argument_at(1, "the_template", call.argument_at(1, "other")))
    size = given.shape if isinstance(given, torch.Tensor) else given
    wanted = tuple(size) if isinstance(size, list | tuple) else tuple(call.args[1:])
    if wanted != tuple(call.args[0].shape):
        raise NamesError(f"the shape would become {wanted}, with unknown names. Use tensor.rename(None)")
    return call.tensor_names()


def replaced_data_names(call: OperatorCall) -> Names:
    """Return the input's names; the new data must fit them, in as many dimensions."""
    names, new = call.tensor_names(), names_of(call.args[1])
    if len(names) != len(new) or unify_names(names, new) != names:
        raise NamesError("the new data has other dimensions: rename, or make a new tensor")
    return names


def indexed_names(call: OperatorCall) -> Names:
    """Return the names after indexing: a number removes its dimension, a slice keeps it, None adds one."""
    names = call.tensor_names()
    given = [_as_index(each) for each in (call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],))]
    # torch merges their dimensions into one, at a place that depends on the indices between them.
    if sum(isinstance(each, torch.Tensor) and each.dim() > 0 for each in given) > 1:
        raise NamesError("several lists or tensors index together: apply them one by one, or use tensor.rename(None)")
    used = sum(1 for each in given if each is not None and each is not ...)  # dimensions of the input
    if used > len(names):
        raise NamesError(f"{used} indices for {len(names)} dimensions")
    made: list[str | None] = []
    rest = iter(names)  # names not reached yet
    for each in given:
        if each is ...:
            made += [next(rest) for _ in range(len(names) - used)]  # all that no index uses
        else:
            made += [None] if each is None else _names_after_index(each, next(rest))
    return check_unique((*made, *rest))


def _as_index(index: Any) -> Any:
    """Return a list, range or array as a tensor; a number, slice, None or `...` unchanged."""
    if isinstance(index, bool):
        raise NamesError(f"{index} as an index adds a dimension: use None, or a mask of one dimension")
    plain = index is None or index is ... or isinstance(index, int | slice | torch.Tensor)
    return index if plain else torch.as_tensor(index)


def _names_after_index(index: Any, name: str | None) -> list[str | None]:
    """Return the names that remain of a dimension after this index."""
    if isinstance(index, slice):
        return [name]
    if not isinstance(index, torch.Tensor):
        return []
    if index.dtype in (torch.bool, torch.uint8) and index.dim() != 1:  # it removes several dimensions
        raise NamesError(f"a mask of {index.dim()} dimensions leaves none with a name: use masked_select")
    own = names_of(index)
    return [unify_names((name,), own)[0]] if index.dim() == 1 else [*own]


def assigned_names(call: OperatorCall) -> Names:
    """Return the input's names; the value must fit the part that it is written to."""
    if isinstance(call.args[2], torch.Tensor):
        target = indexed_names(call)
        if unify_names(target, names_of(call.args[2])) != target and any(call.tensor_names()):
            raise NamesError(f"the value has names that {format_names(target)} has not")
    return call.tensor_names()
