"""The rules of what layers call. Weights that have names say which names go in and come out; others leave it open.

A dimension that a layer makes is named after the weight's, so that of a weight without names has none.
"""

from __future__ import annotations

from torch import Tensor

from rpcbench.named.call import Call, names_of
from rpcbench.named.dims import Names, NamesError, unify, unique


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
