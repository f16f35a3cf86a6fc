"""A tensor whose dimensions have names: its dispatch, its methods, and the functions that create one.

Guarantees
- Apart from names it is an ordinary tensor: same memory, same graph. Only named tensors pay the cost of names.
- Views and results of operators have the names that the rules give them. Gradients have those of their tensor.
- Names are lost only by `rename(None)`, and by operators whose result is not a tensor.
- A call of a torch operator first applies its rule, then runs the operator, then names the result. A mismatch is
  reported before anything is computed or changed, by an error that shows all tensors of the call.
- An operator without a row in the table refuses tensors that have names; none drops them silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.utils import swap_tensors

from rpcbench.named.dimnames import (
    Names,
    NamesError,
    align_names,
    flatten_names,
    format_names,
    refine_names,
    rename_names,
    unflatten_names,
    unify_names,
)
from rpcbench.named.operators import ROWS
from rpcbench.named.rules import OperatorCall, Row, format_tensor, names_of
from rpcbench.runtime.handles import register_description

Function = Callable[..., Any]
HOMES = (torch, functional, torch._C._nn, torch.special, torch.linalg)
"""The modules in which torch offers functions that have a row."""
NO_DISPATCH = torch._C.DisableTorchFunctionSubclass


def dispatch_function(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Names | None]:
    """Return the result of `function`, and the names that it is to have; None if it is to be left unchanged."""
    row = FUNCTIONS.get(function)
    with NO_DISPATCH():  # else each call below would come back here
        if row is None:
            return _run_without_rule(function, args, kwargs), None
        infer = row.infer
        if infer is None and not row.dims:
            return function(*args, **kwargs), None
        call = OperatorCall(row, args, kwargs)
        try:
            if row.dims:
                call.resolve_dims()
            # Before the operator runs, so that a mismatch changes nothing.
            names = infer(call) if infer is not None else None
            if names is not None and (row.is_inplace or "out" in kwargs):
                _check_target(row, call, names)
        except NamesError as error:
            raise NamesError(f"{row.name} of {call.format_tensors()}: {error}") from None
        result = function(*call.args, **call.kwargs)
        if names is not None and not row.is_inplace and any(result is each for each in call.args):
            # torch returns the argument itself if there is nothing to do, as in to(). It must not be renamed: alias it.
            return (result, None) if names == names_of(result) else (result.as_subclass(Tensor), names)
        return result, names


def _check_target(row: Row, call: OperatorCall, names: Names) -> None:
    """Raise NamesError if a tensor that is written to has other names than the result, and cannot get these."""
    target = call.kwargs.get("out", call.args[0])
    for each in target if isinstance(target, tuple | list) else (target,):
        own = names_of(each)
        strict = "out" in call.kwargs or row.name == "copy_"  # an operator in place has unified names already
        if strict and any(own) and own != names:
            raise NamesError(f"the result is {format_names(names)}, and out is {format_names(own)}: rename that first")
        # Another subclass, as a Parameter, cannot become a NamedTensor in place.
        if type(each) is not Tensor and not hasattr(each, "_dim_names") and own != names:
            raise NamesError(
                f"a {type(each).__name__} without names would become {format_names(names)}: name it before"
            )


def _run_without_rule(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that has no row; NamesError if a tensor in its arguments has names."""
    tensors = [each for each in _find_tensors((args, kwargs)) if any(names_of(each))]
    if tensors:
        raise NamesError(
            f"{_label_of_function(function)} has no rule for names, so it cannot take "
            f"{' and '.join(map(format_tensor, tensors))}. "
            "Remove them with tensor.rename(None), and name the result: named(result, 'N', 'C')"
        )
    return function(*args, **kwargs)


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _find_tensors(each)
    elif isinstance(value, dict):
        yield from _find_tensors([*value.values()])


def _label_of_function(function: Function) -> str:
    """Return the name of a function, or of a property's getter, for errors."""
    owner = getattr(function, "__self__", None)
    name: str = getattr(function, "__name__", repr(function))
    return f"tensor.{owner.__name__}" if name in ("__get__", "__set__") and owner is not None else name


def operator_functions(row: Row) -> Iterator[Function]:
    """Yield all functions by which torch offers an operator: its method, or property, and those of HOMES."""
    method = getattr(Tensor, row.name, None)
    if callable(method):
        yield method
    elif method is not None:
        yield method.__get__
    yield from (found for module in HOMES if callable(found := getattr(module, row.name, None)))


FUNCTIONS: dict[Function, Row] = {
    function: row for row in reversed(ROWS.values()) for function in operator_functions(row)
}
"""The row of each function that torch dispatches. Reversed: where two rows share a function, the first counts."""
FUNCTIONS[Tensor.requires_grad.__set__] = ROWS["requires_grad_"]  # type: ignore[attr-defined]
FUNCTIONS[Tensor.data.__set__] = ROWS["data="]  # type: ignore[attr-defined]
OWN: dict[Function, Function] = {}
"""Replacements for functions that handle names themselves, without a row."""


_Grad: Any = Tensor.grad


class NamedTensor(Tensor):
    """A tensor whose dimensions have names. Made by `named`, by `zeros` and similar, and by operators."""

    _dim_names: Names | None = None

    if TYPE_CHECKING:  # methods, made below, that take names, unlike torch's signatures
        sum = mean = prod = std = var = median = mode = kthvalue = logsumexp = amax = amin = max = min = cast(Any, None)
        argmax = argmin = all = any = squeeze = unbind = select = narrow = split = chunk = topk = cast(Any, None)
        transpose = cumsum = cumprod = softmax = log_softmax = sort = index_fill = size = stride = cast(Any, None)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return apply_function(func, args, kwargs or {})

    @property
    def names(self) -> Names:
        """The names of the dimensions, in order; None for a dimension without a name."""
        return names_of(self)

    @names.setter
    def names(self, names: Iterable[str | None] | None) -> None:
        """Rename in place, with one name for each dimension; None removes all names."""
        if isinstance(names, str):
            raise NamesError(f"x.names = {names!r}: it takes a tuple with a name for each dimension, or None")
        self.rename_(*(None,) if names is None else names)

    def has_names(self) -> bool:
        """Return whether any dimension has a name."""
        return any(self.names)

    def rename(self, *names: Any, **renamed: str | None) -> Any:
        """Return the same memory under other names: `rename("N", ..., "W")`, `rename(N="batch")`.

        `rename(None)` returns a plain torch.Tensor.

        Args:
            names: the new names in order; `...` stands for those that do not change.
            renamed: new names by old names, instead of `names`.

        Raises:
            NamesError: for a name that does not exist, or that would occur twice.
        """
        if names == (None,) and not renamed:
            with NO_DISPATCH():
                return self.as_subclass(Tensor)
        return alias_with_names(self, run_with_label("rename", self, lambda: rename_names(self.names, names, renamed)))

    def rename_(self, *names: Any, **renamed: str | None) -> NamedTensor:
        """Rename this tensor in place, as `rename`; `rename_(None)` leaves it without names."""
        given = (None,) * len(self.names) if names == (None,) else names
        self._dim_names = run_with_label("rename_", self, lambda: rename_names(self.names, given, renamed))
        return self

    def refine_names(self, *names: Any) -> NamedTensor:
        """Return the same memory, with names for dimensions that had none; existing names must be the same."""
        return alias_with_names(self, run_with_label("refine_names", self, lambda: refine_names(self.names, names)))

    def align_to(self, *names: Any) -> NamedTensor:
        """Return a view with its dimensions in this order, and one of size 1 for each name that it does not have.
        All its dimensions must have names, and all must be listed; `...` means those that are not."""
        return self._align_dimensions("align_to", names)

    def align_as(self, other: Tensor) -> NamedTensor:
        """Return a view with the dimensions of `other`, in its order; see `align_to`."""
        if None in names_of(other):
            raise NamesError(
                f"align_as of {format_tensor(self)} and {format_tensor(other)}: all dimensions of the latter need names"
            )
        return self._align_dimensions("align_as", names_of(other))

    def _align_dimensions(self, label: str, names: tuple[Any, ...]) -> NamedTensor:
        current = self.names
        made = run_with_label(label, self, lambda: align_names(current, names))
        with NO_DISPATCH():
            # The tensor's own dimensions in the new order; then, from left to right, the missing ones.
            view = Tensor.permute(self, [current.index(name) for name in made if name in current])
            for place, name in enumerate(made):
                view = view if name in current else Tensor.unsqueeze(view, place)
        return cast(NamedTensor, attach_names(view, made))

    def flatten(self, *dims: Any, **given: Any) -> NamedTensor:
        """Return a view with adjacent dimensions as one: `flatten(["C", "H", "W"], "features")`.
        `flatten("C", "W", "features")` gives the first and the last of them. The new dimension need not have a name."""
        first, last, made = run_with_label("flatten", self, lambda: flatten_names(self.names, *dims, **given))
        with NO_DISPATCH():
            flat = Tensor.flatten(self, first, last)
        return alias_with_names(flat, made) if flat is self else cast(NamedTensor, attach_names(flat, made))

    def unflatten(self, dim: Any, sizes: Any) -> NamedTensor:
        """Return a view with one dimension as several, of these names and sizes.

        Args:
            dim: a name or an index.
            sizes: pairs of name and size: `unflatten("features", [("C", 3), ("H", 8)])`; or sizes, for dimensions
                without names.

        Raises:
            NamesError: where a name would occur twice.
        """
        place, shape, made = run_with_label("unflatten", self, lambda: unflatten_names(self.names, dim, sizes))
        with NO_DISPATCH():
            return cast(NamedTensor, attach_names(Tensor.unflatten(self, place, shape), made))  # type: ignore[no-untyped-call]

    def detach_(self) -> NamedTensor:
        """Detach in place, also a view, as `named` and `rename` return; not if a graph holds that view."""
        with NO_DISPATCH():
            if not self.requires_grad or not self._is_view():
                return cast(NamedTensor, Tensor.detach_(self)) if self.requires_grad else self
            # torch refuses views, but here every named tensor may be one: exchange it with a detached one.
            detached = alias_with_names(Tensor.detach(self), self.names)
            vars(detached).update(vars(self))
            try:
                swap_tensors(self, detached)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                message = (
                    f"detach_ of {format_tensor(self)}: a graph or a weak reference holds this view; use x = x.detach()"
                )
                raise NamesError(message) from error
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient, under the names of this tensor."""
        with NO_DISPATCH():
            found: Tensor | None = _Grad.__get__(self)
        return found if found is None else attach_names(found, self.names)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with NO_DISPATCH():
            _Grad.__set__(self, value if value is None else self._name_gradient("grad", value))

    @grad.deleter
    def grad(self) -> None:
        with NO_DISPATCH():
            _Grad.__set__(self, None)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Register a hook, as torch's; its gradient has the names of this tensor."""
        names = self.names
        with NO_DISPATCH():
            return Tensor.register_hook(self, lambda gradient: hook(alias_with_names(gradient, names)))  # type: ignore[no-untyped-call]

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, as torch's; the names of `gradient` must fit."""
        fitting = gradient if gradient is None else self._name_gradient("backward", gradient)
        strip_names(self).backward(strip_names(fitting), *args, **kwargs)  # plain tensors, see `_run_grad`

    def _name_gradient(self, label: str, gradient: Tensor) -> NamedTensor:
        """Return a gradient of this tensor under its names; NamesError if it has others."""
        run_with_label(label, self, lambda: unify_names(self.names, names_of(gradient)))
        return alias_with_names(gradient, self.names)

    def permute(self, *dims: Any) -> NamedTensor:
        """Return a view with the dimensions in this order, of names or indices."""
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
        return cast(NamedTensor, run_operator(Tensor.permute, (self, tuple(order)), {}))

    def flip(self, *dims: Any) -> NamedTensor:
        """Return a copy with the order of elements reversed along these dimensions, given by name or index."""
        given = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
        return cast(NamedTensor, run_operator(Tensor.flip, (self, tuple(given)), {}))

    def __format__(self, spec: str) -> str:
        return format(strip_names(self) if spec and not self.dim() else repr(self), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        with NO_DISPATCH():
            text = Tensor.__repr__(self, **options)  # type: ignore[no-untyped-call]
        return f"{text[:-1]}, {format_tensor(self)})"


def _type_of(tensor: NamedTensor) -> str:
    """Return `Tensor (N=32, C=3)`, for panels."""
    return f"{'Parameter' if isinstance(tensor, torch.nn.Parameter) else 'Tensor'} {format_tensor(tensor)}"


register_description(NamedTensor, _type_of)


def run_operator(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator, with names."""
    result, names = dispatch_function(function, args, kwargs)
    return result if names is None else attach_names(result, names)


def apply_function(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of any function: one of `OWN`, or an operator."""
    own = OWN.get(function)
    if own is None:
        return run_operator(function, args, kwargs)
    if not args and "input" in kwargs:  # the name of the tensor in torch's functions
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    return own(*args, **kwargs)


def attach_names(value: Any, names: Names) -> Any:
    """Give names to a new tensor, or to the tensors in a tuple or list; the tensor itself becomes a NamedTensor."""
    kind = type(value)
    if kind is Tensor or kind is NamedTensor:
        if len(names) != value.dim():
            raise NamesError(
                f"a rule gave {format_names(names)} to a result of {value.dim()} dimensions: please report it"
            )
        # In place: the tensor has no other reference yet, and an alias would add a node to the graph.
        value.__class__ = NamedTensor
        value._dim_names = names
    elif isinstance(value, tuple | list):
        for each in value:
            attach_names(each, names)
    return value


def _make_method(function: Function) -> Function:
    """Return a method that dispatches to an operator, with names for its dimensions."""

    @functools.wraps(function)
    def method(self: NamedTensor, *args: Any, **kwargs: Any) -> Any:
        return run_operator(function, (self, *args), kwargs)

    return method


# torch parses the arguments of its methods before it dispatches to a subclass, and would reject names.
for _function, _row in FUNCTIONS.items():
    if _row.dims and getattr(Tensor, _row.name, None) is _function and _row.name not in vars(NamedTensor):
        setattr(NamedTensor, _row.name, _make_method(_function))


for _name in ("flatten", "unflatten", "detach_", "register_hook", "backward"):
    OWN[getattr(Tensor, _name)] = vars(NamedTensor)[_name]
OWN[torch.flatten], OWN[torch.unflatten] = NamedTensor.flatten, NamedTensor.unflatten
OWN[torch.detach_] = NamedTensor.detach_


def named(tensor: Tensor, *names: Any) -> NamedTensor:
    """Return the same memory, and graph, with names for its dimensions: `named(x, "N", "C")`.

    A tensor that has names gets these only for dimensions without one, as by `refine_names`.

    Args:
        tensor: any tensor.
        names: one for each dimension, or None; `...` leaves some without.

    Raises:
        NamesError: where their number or form is wrong.
    """
    if isinstance(tensor, NamedTensor):
        return tensor.refine_names(*names)
    return alias_with_names(
        tensor, run_with_label("named", tensor, lambda: refine_names((None,) * tensor.dim(), names))
    )


def strip_names(value: Any) -> Any:
    """Return the same tensor without names, in its graph; any other value unchanged."""
    return value.rename(None) if isinstance(value, NamedTensor) else value


def alias_with_names(tensor: Tensor, names: Names) -> NamedTensor:
    """Return the same memory, and graph, under these names."""
    with NO_DISPATCH():
        made = tensor.as_subclass(NamedTensor)
    made._dim_names = names
    return made


def run_with_label(label: str, tensor: Tensor, work: Callable[[], Any]) -> Any:
    """Return the result of `work`; add the tensor to its errors."""
    try:
        return work()
    except NamesError as error:
        raise NamesError(f"{label} of {format_tensor(tensor)}: {error}") from None


def _run_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Run torch.autograd.grad, and name the gradients."""
    if kwargs.get("is_grads_batched"):  # gradients have a dimension more than their tensor then
        raise NamesError("grad with is_grads_batched does not support names: use tensor.rename(None)")
    roots, leaves = _as_sequence(outputs), _as_sequence(inputs)
    given = None if grad_outputs is None else _as_sequence(grad_outputs)
    _check_gradients(roots, given)
    edges = _gradient_edges(leaves)
    # With plain tensors, so that a user's hooks on the way see torch as usual.
    found = torch.autograd.grad(
        [*map(strip_names, roots)], edges, given and [*map(strip_names, given)], *args, **kwargs
    )
    pairs = zip(leaves, found, strict=True)
    return tuple(gradient if gradient is None else gradient_with_names(leaf, gradient) for leaf, gradient in pairs)


def _run_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    """Run torch.autograd.backward with plain tensors, as `_run_grad`."""
    roots = _as_sequence(tensors)
    given = grad_variables if grad_tensors is None else grad_tensors
    given = None if given is None else _as_sequence(given)
    _check_gradients(roots, given)
    leaves = None if inputs is None else _gradient_edges(_as_sequence(inputs))
    torch.autograd.backward(
        [*map(strip_names, roots)], given and [*map(strip_names, given)], retain_graph, create_graph, inputs=leaves
    )


def gradient_with_names(tensor: Tensor | GradientEdge, gradient: Tensor) -> Tensor:
    """Return a gradient of `tensor`, under its names if it has some."""
    return alias_with_names(gradient, tensor.names) if isinstance(tensor, NamedTensor) else gradient


def _check_gradients(roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None] | None) -> None:
    for root, gradient in zip(roots, gradients or (), strict=False):
        if gradient is not None and isinstance(root, Tensor):
            run_with_label("grad", root, partial(unify_names, names_of(root), names_of(gradient)))


def _gradient_edges(leaves: Sequence[Tensor | GradientEdge]) -> list[GradientEdge]:
    with NO_DISPATCH():
        return [get_gradient_edge(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _as_sequence(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, Tensor | GradientEdge) else [*value]


OWN[torch.autograd.grad] = _run_grad
OWN[torch.autograd.backward] = _run_backward


_Names = Iterable[str | None]


def tensor(data: Any, *, names: _Names, **options: Any) -> NamedTensor:
    """Return `torch.tensor` with names: `tensor([[1.0]], names=("N", "C"))`.

    Args:
        data: values, as torch.tensor takes them.
        names: one for each dimension, or None.
        options: as torch.tensor's.

    Raises:
        NamesError: where the names do not fit.
    """
    return _make_named(torch.tensor, (data,), names, options)


def zeros(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """Return `torch.zeros` with names: `zeros(32, 3, names=("N", "C"))`."""
    return _make_named(torch.zeros, size, names, options)


def ones(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """Return `torch.ones` with names; see `zeros`."""
    return _make_named(torch.ones, size, names, options)


def empty(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """Return `torch.empty` with names; see `zeros`."""
    return _make_named(torch.empty, size, names, options)


def rand(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """Return `torch.rand` with names; see `zeros`."""
    return _make_named(torch.rand, size, names, options)


def randn(*size: Any, names: _Names, **options: Any) -> NamedTensor:
    """Return `torch.randn` with names; see `zeros`."""
    return _make_named(torch.randn, size, names, options)


def empty_like(input: Tensor, *, names: _Names | None = None, **options: Any) -> NamedTensor:
    """Return `torch.empty_like`; without `names` it has those of `input`, which must have some then."""
    given = input.names if names is None and isinstance(input, NamedTensor) else names or ()
    return _make_named(torch.empty_like, (strip_names(input),), given, options)


def _make_named(
    make: Callable[..., Tensor], args: tuple[Any, ...], names: _Names, options: dict[str, Any]
) -> NamedTensor:
    made = make(*args, **options)
    fitting = run_with_label(make.__name__, made, lambda: refine_names((None,) * made.dim(), tuple(names)))
    return cast(NamedTensor, attach_names(made, fitting))
