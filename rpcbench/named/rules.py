"""The rules by which names go through operators: one small function each, from a call to the names of its result.

They run before the operator does, so what does not fit has changed nothing. Sizes are torch's to check.

Layers: weights that have names say which names go in and come out; others leave it open. A dimension that a layer makes
is named after the weight's, so that of a weight without names has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from rpcbench.named.dimnames import Names, NamesError, listed, position, shown, unify, unique


class Along(Protocol):
    """What a row of the table says of its operator's arguments."""

    @property
    def dims(self) -> tuple[tuple[int, str], ...]: ...
    @property
    def keepdim(self) -> int: ...
    @property
    def default(self) -> int | None: ...


def names_of(tensor: torch.Tensor) -> Names:
    """The names of a tensor's dimensions; of any tensor, so all are None where it is no named one."""
    names: Names | None = getattr(tensor, "_dim_names", None)
    return (None,) * tensor.dim() if names is None else names


class Call:
    """The first argument is always there by position; dimensions are indices once `resolve` has been called."""

    __slots__ = ("args", "kwargs", "row")

    def __init__(self, row: Along, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args:
            first = next((key for key in ("input", "self", "tensors") if key in kwargs), None)
            if first is not None:
                kwargs = dict(kwargs)
                args = (kwargs.pop(first),)
        self.row, self.args, self.kwargs = row, args, kwargs

    def resolve(self) -> None:
        """Put indices in place of names of dimensions."""
        names = names_of(self.args[0] if isinstance(self.args[0], torch.Tensor) else self.args[0][0])
        for place, keyword in self.row.dims:
            given = self.arg(place, keyword)
            if not isinstance(given, str | list | tuple):
                continue
            if len(self.args) > place:
                self.args = (*self.args[:place], position(given, names), *self.args[place + 1 :])
            else:
                self.kwargs = {**self.kwargs, keyword: position(given, names)}

    def arg(self, place: int, keyword: str, default: Any = None) -> Any:
        """An argument, however it is given."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(keyword, default)

    def names(self, place: int = 0, keyword: str = "") -> Names:
        """The names of the tensor at that place."""
        return names_of(self.arg(place, keyword))

    def dim(self, which: int = 0) -> Any:
        """The dimension, or dimensions, that the call is about; None for all."""
        place, keyword = self.row.dims[which]
        return self.arg(place, keyword, self.row.default)

    def keepdim(self) -> bool:
        """Whether dimensions that are summed over stay, of size 1."""
        place = self.row.keepdim
        return bool(place) and bool(self.arg(place, "keepdim", False))

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors it takes, in order, those in a list among them; not the one it writes to."""
        for value in (*self.args, *(value for key, value in self.kwargs.items() if key != "out")):
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from (each for each in value if isinstance(each, torch.Tensor))

    def shown(self) -> str:
        """The tensors as errors show them."""
        return " and ".join(show(tensor) for tensor in self.tensors())


def show(tensor: torch.Tensor) -> str:
    """`(N=32, C=3)`."""
    names = names_of(tensor)
    return shown(names, tensor.shape) if len(names) == tensor.dim() else listed(names)


def linear(call: Call) -> Names:
    """(…, in) with a weight (out, in) gives (…, out)."""
    names, weight = call.names(), call.names(1, "weight")
    _same(names[-1], weight[-1], "the last dimension of the input", "the weight's")
    return _biased(call, (*names[:-1], *weight[:-1]))


def convolution(call: Call) -> Names:
    """(…, in, *places) with a weight (out, in, *window) gives (…, out, *places)."""
    names, weight = call.names(), call.names(1, "weight")
    channel = len(names) - len(weight) + 1
    _same(names[channel], weight[1], "the channels of the input", "the weight's")
    made = unique((*names[:channel], weight[0], *names[channel + 1 :]))
    bias = call.arg(2, "bias")
    if bias is not None:
        _same(weight[0], names_of(bias)[0], "the channels that the weight makes", "the bias's")
    return made


def layer_norm(call: Call) -> Names:
    """Those of the input, whose last ones are those of the weight."""
    names = call.names()
    for place, keyword in ((2, "weight"), (3, "bias")):
        if isinstance(part := call.arg(place, keyword), Tensor):
            names = unify(names, names_of(part))
    return names


def batch_norm(call: Call) -> Names:
    """Those of the input, whose channels are the weight's."""
    return _channels(call, 3)


def group_norm(call: Call) -> Names:
    """Those of the input, whose channels are the weight's."""
    return _channels(call, 2)


def _channels(call: Call, place: int) -> Names:
    names, weight = call.names(), call.arg(place, "weight")
    if weight is not None:
        _same(names[1], names_of(weight)[0], "the channels of the input", "the weight's")
    return names


def einsum(call: Call) -> Names:
    """Dimensions of one letter have one name."""
    inputs, arrow, output = str(call.args[0]).replace(" ", "").partition("->")
    operands = call.args[1] if isinstance(call.args[1], list | tuple) else call.args[1:]
    if "." in inputs:
        raise NamesError(f"the equation {call.args[0]!r} has dimensions without a letter: write out all of them")
    known: dict[str, str | None] = {}
    for letters, operand in zip(inputs.split(","), operands, strict=True):
        for letter, name in zip(letters, names_of(operand), strict=True):
            _same(known.get(letter), name, f"a dimension {letter!r}", "another")
            known[letter] = known.get(letter) or name
    left = sorted(letter for letter in known if inputs.count(letter) == 1)
    return unique(tuple(known[letter] for letter in (output if arrow else left)))


def embedding(call: Call) -> Names:
    """(…) of a table (rows, width) gives (…, width)."""
    return unique((*call.names(), call.names(1, "weight")[-1]))


def attention(call: Call) -> Names:
    """(…, to, e), (…, from, e), (…, from, v) give (…, to, v)."""
    query, key, value = call.names(), call.names(1, "key"), call.names(2, "value")
    _same(query[-1], key[-1], "the last dimension of the query", "the key's")
    _same(key[-2], value[-2], "the positions of the key", "the value's")
    batch: Names = (*query[:-2], None, None)
    for other in (key, value):
        batch = unify(batch, (*other[:-2], None, None))
    return unique((*batch[:-2], query[-2], value[-1]))


def loss(call: Call) -> Names:
    """Input and target unify; a mean or a sum of them has no dimensions."""
    names = unify(call.names(), call.names(1, "target"))
    return names if call.kwargs.get("reduction") == "none" else ()


def of_classes(call: Call) -> Names:
    """The target has the input's dimensions but that of classes, or all of them where it holds probabilities."""
    names, target = call.names(), call.names(1, "target")
    classes = min(1, len(names) - 1)
    without = (*names[:classes], *names[classes + 1 :])
    unify(names if len(target) == len(names) else without, target)
    return without if call.kwargs.get("reduction") == "none" else ()


def _same(one: str | None, other: str | None, first: str, second: str) -> None:
    if one is not None and other is not None and one != other:
        raise NamesError(f"{first} is {one!r} and {second} {other!r}")


def _biased(call: Call, names: Names) -> Names:
    bias = call.arg(2, "bias")
    return unique(names if bias is None else unify(names, names_of(bias)))


def keeps(call: Call) -> Names:
    """Those of the input."""
    return call.names()


def expanded(call: Call) -> Names:
    """Those of the input, behind dimensions that are new."""
    sizes = call.arg(1, "size")
    count = len(sizes) if isinstance(sizes, list | tuple) else len(call.args) - 1
    return (None,) * (count - len(call.names())) + call.names()


def unifies(call: Call) -> Names:
    """Those of all tensors together."""
    tensors = call.tensors()
    names = names_of(next(tensors))
    for other in tensors:
        names = unify(names, names_of(other))
    return names


def where(call: Call) -> Names:
    """Those of all tensors together; of a condition alone come indices, whose dimension has no name."""
    return (None,) if len(call.args) + len(call.kwargs) == 1 else unifies(call)


def joined(call: Call) -> Names:
    """Those of all tensors in the list together. An empty one of one dimension fits all, as torch has it."""
    return _together([names_of(each) for each in call.args[0] if each.dim() != 1 or each.numel()])


def _together(all_names: list[Names]) -> Names:
    names = all_names[0] if all_names else (None,)
    for other in all_names[1:]:
        names = unify(names, other)
    return names


def stacked(call: Call) -> Names:
    """Those of all tensors together, and a dimension without a name."""
    return _with_new(_together([names_of(each) for each in call.args[0]]), call.arg(1, "dim", 0))


def unsqueezed(call: Call) -> Names:
    """Those of the input, and a dimension without a name."""
    return _with_new(call.names(), call.arg(1, "dim"))


def _with_new(names: Names, dim: int) -> Names:
    place = dim + len(names) + 1 if dim < 0 else dim
    return (*names[:place], None, *names[place:])


def matrices(call: Call) -> Names:
    """(n, d) by (d, m) gives (n, m)."""
    return unique((call.names()[-2], call.names(1, "mat2")[-1]))


def matrix_vector(call: Call) -> Names:
    """(n, d) by (d) gives (n)."""
    return call.names()[:-1]


def batches(call: Call) -> Names:
    """As matrices, vectors or batches of matrices; the dimensions of batches unify."""
    return _product(call.names(), call.names(1, "mat2" if "mat2" in call.kwargs else "other"))


def batches_from_right(call: Call) -> Names:
    """As `batches`, the second argument first."""
    return _product(call.names(1, "other"), call.names())


def _product(first: Names, second: Names) -> Names:
    if len(second) == 1:
        return first[:-1]
    if len(first) == 1:
        return second[:-2] + second[-1:]
    batch = unify((*first[:-2], None, None), (*second[:-2], None, None))[:-2]
    return unique((*batch, first[-2], second[-1]))


def added_matrices(call: Call) -> Names:
    """As `matrices`, unified with what is added."""
    return unify(call.names(), unique((call.names(1, "mat1")[-2], call.names(2, "mat2")[-1])))


def added_vector(call: Call) -> Names:
    """As `matrix_vector`, unified with what is added."""
    return unify(call.names(), call.names(1, "mat")[:-1])


def removes(call: Call) -> Names:
    """Those of the dimensions that are left."""
    names, dims = call.names(), call.dim()
    if call.keepdim():
        return names
    if dims is None or isinstance(dims, bool) or (not isinstance(dims, int) and not dims):
        return ()
    return _left(names, dims)


def extremes(call: Call) -> Names:
    """Of two tensors as `unifies`, else as `removes`."""
    return unifies(call) if isinstance(call.arg(1, "other"), torch.Tensor) else removes(call)


def _left(names: Names, dims: Any) -> Names:
    gone = {dim % max(len(names), 1) for dim in (dims if isinstance(dims, list | tuple) else (dims,))}
    return tuple(name for place, name in enumerate(names) if place not in gone)


def squeezed(call: Call) -> Names:
    """Without the dimensions of size 1, or those of them that are given."""
    names, shape, dims = call.names(), call.args[0].shape, call.dim()
    if not names:
        return names
    wanted = range(len(names)) if dims is None else dims if isinstance(dims, list | tuple) else (dims,)
    return _left(names, [dim for dim in wanted if shape[dim] == 1])


def transposed(call: Call) -> Names:
    """Two names change places."""
    names = list(call.names())
    one, other = call.dim(0), call.dim(1)
    if names:
        names[one], names[other] = names[other], names[one]
    return tuple(names)


def turned(call: Call) -> Names:
    """From right to left."""
    return call.names()[::-1]


def matrix_turned(call: Call) -> Names:
    """The last two change places."""
    names = call.names()
    return (*names[:-2], *names[:-3:-1])


def permuted(call: Call) -> Names:
    """In the order given."""
    names, dims = call.names(), call.dim()
    return tuple(names[dim] for dim in (call.args[1:] if isinstance(dims, int) else dims))


def masked(call: Call) -> Names:
    """The mask must fit the input; the elements it leaves lie in no dimension of either."""
    unify(call.names(), call.names(1, "mask"))
    return (None,)


def same_shape(call: Call) -> Names:
    """Only a resize, or a view as another, that changes no size."""
    given = call.arg(1, "size", call.arg(1, "the_template", call.arg(1, "other")))
    size = given.shape if isinstance(given, torch.Tensor) else given
    wanted = tuple(size) if isinstance(size, list | tuple) else tuple(call.args[1:])
    if wanted != tuple(call.args[0].shape):
        raise NamesError(f"the shape would become {wanted}, and nobody knows the names then. Use tensor.rename(None)")
    return call.names()


def replaced(call: Call) -> Names:
    """The new data must fit, and be of as many dimensions; the names stay."""
    names, new = call.names(), names_of(call.args[1])
    if len(names) != len(new) or unify(names, new) != names:
        raise NamesError("the new data has other dimensions: rename, or make a new tensor")
    return names


def indexed(call: Call) -> Names:
    """A number takes its dimension away, a slice keeps it, None adds one, a list or tensor of one dimension chooses."""
    names = call.names()
    given = [_as_index(each) for each in (call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],))]
    if sum(isinstance(each, torch.Tensor) and each.dim() > 0 for each in given) > 1:
        raise NamesError("several lists or tensors choose together: take them one by one, or use tensor.rename(None)")
    used = sum(1 for each in given if each is not None and each is not ...)
    if used > len(names):
        raise NamesError(f"{used} indices for {len(names)} dimensions")
    made: list[str | None] = []
    rest = iter(names)
    for each in given:
        if each is ...:
            made += [next(rest) for _ in range(len(names) - used)]
        else:
            made += [None] if each is None else _chosen(each, next(rest))
    return unique((*made, *rest))


def _as_index(index: Any) -> Any:
    """A list, a range or an array as a tensor; numbers, slices, None and `...` as they are."""
    if isinstance(index, bool):
        raise NamesError(f"{index} as an index adds a dimension: use None, or a mask of one dimension")
    plain = index is None or index is ... or isinstance(index, int | slice | torch.Tensor)
    return index if plain else torch.as_tensor(index)


def _chosen(index: Any, name: str | None) -> list[str | None]:
    if isinstance(index, slice):
        return [name]
    if not isinstance(index, torch.Tensor):
        return []
    if index.dtype in (torch.bool, torch.uint8) and index.dim() != 1:
        raise NamesError(f"a mask of {index.dim()} dimensions leaves none with a name: use masked_select")
    own = names_of(index)
    return [unify((name,), own)[0]] if index.dim() == 1 else [*own]


def assigned(call: Call) -> Names:
    """The value must fit what it is written to; the names stay."""
    if isinstance(call.args[2], torch.Tensor):
        target = indexed(call)
        if unify(target, names_of(call.args[2])) != target and any(call.names()):
            raise NamesError(f"the value has names that {target} has not")
    return call.names()
