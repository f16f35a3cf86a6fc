"""A tensor whose dimensions have names, and what only such a tensor can do.

Guarantees
- It is an ordinary tensor besides: same memory, same graph; what names cost, only named tensors pay.
- Views and what operators make have the names that the rules give them. Gradients have those of their tensor.
- Only `rename(None)`, and what gives no tensor, leads out of names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils import swap_tensors

from rpcbench.named import changes
from rpcbench.named.call import names_of, show
from rpcbench.named.dims import Names, NamesError, listed, unify
from rpcbench.named.dispatch import FUNCTIONS, OWN, Function, dispatch
from rpcbench.runtime.handles import describe

_PLAIN = torch._C.DisableTorchFunctionSubclass
_Grad: Any = Tensor.grad


class NamedTensor(Tensor):
    """A tensor whose dimensions have names. Made by `named`, by `zeros` and its like, and by what operators give."""

    _dim_names: Names | None = None

    if TYPE_CHECKING:  # methods that take names, which torch's signatures do not: they are made below
        sum = mean = prod = std = var = median = mode = kthvalue = logsumexp = amax = amin = max = min = cast(Any, None)
        argmax = argmin = all = any = squeeze = unbind = select = narrow = split = chunk = topk = cast(Any, None)
        transpose = cumsum = cumprod = softmax = log_softmax = sort = index_fill = size = stride = cast(Any, None)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return apply(func, args, kwargs or {})

    @property
    def names(self) -> Names:
        """The names of the dimensions, in order; None for one without a name."""
        return names_of(self)

    @names.setter
    def names(self, names: Iterable[str | None] | None) -> None:
        """As `rename_`, with one name for each dimension; None leaves the tensor without names."""
        if isinstance(names, str):
            raise NamesError(f"x.names = {names!r}: it takes a tuple with a name for each dimension, or None")
        self.rename_(*(None,) if names is None else names)

    def has_names(self) -> bool:
        """Whether any dimension has a name."""
        return any(self.names)

    def rename(self, *names: Any, **renamed: str | None) -> Any:
        """The same memory under other names: `rename("N", ..., "W")`, `rename(N="batch")`.

        `rename(None)` is a plain torch.Tensor.
        """
        if names == (None,) and not renamed:
            with _PLAIN():
                return self.as_subclass(Tensor)
        return alias(self, told("rename", self, lambda: changes.renamed(self.names, names, renamed)))

    def rename_(self, *names: Any, **renamed: str | None) -> NamedTensor:
        """As `rename`, of this very tensor; `rename_(None)` leaves it without names."""
        given = (None,) * len(self.names) if names == (None,) else names
        self._dim_names = told("rename_", self, lambda: changes.renamed(self.names, given, renamed))
        return self

    def refine_names(self, *names: Any) -> NamedTensor:
        """The same memory, with names for dimensions that had none; where one had a name it must be the same."""
        return alias(self, told("refine_names", self, lambda: changes.refined(self.names, names)))

    def align_to(self, *names: Any) -> NamedTensor:
        """A view with its dimensions in this order, and one of size 1 for each name it does not have.

        All its dimensions must have names, and all be listed; `...` stands for those that are not.
        """
        return self._aligned("align_to", names)

    def align_as(self, other: Tensor) -> NamedTensor:
        """A view with the dimensions of `other`, in its order; see `align_to`."""
        if None in names_of(other):
            raise NamesError(f"align_as of {show(self)} and {show(other)}: all dimensions of the latter need names")
        return self._aligned("align_as", names_of(other))

    def _aligned(self, label: str, names: tuple[Any, ...]) -> NamedTensor:
        current = self.names
        made = told(label, self, lambda: changes.aligned(current, names))
        with _PLAIN():
            view = Tensor.permute(self, [current.index(name) for name in made if name in current])
            for place, name in enumerate(made):
                view = view if name in current else Tensor.unsqueeze(view, place)
        return cast(NamedTensor, dress(view, made))

    def flatten(self, *dims: Any, **given: Any) -> NamedTensor:
        """`flatten(["C", "H", "W"], "features")`: dimensions side by side become one, of that name.

        Also `flatten("C", "W", "features")`, from the one to the other. The new dimension need not have a name.
        """
        first, last, made = told("flatten", self, lambda: changes.flattened(self.names, *dims, **given))
        with _PLAIN():
            flat = Tensor.flatten(self, first, last)
        return alias(flat, made) if flat is self else cast(NamedTensor, dress(flat, made))

    def unflatten(self, dim: Any, sizes: Any) -> NamedTensor:
        """`unflatten("features", [("C", 3), ("H", 8)])`: one dimension becomes several, of these names and sizes."""
        place, shape, made = told("unflatten", self, lambda: changes.unflattened(self.names, dim, sizes))
        with _PLAIN():
            return cast(NamedTensor, dress(Tensor.unflatten(self, place, shape), made))  # type: ignore[no-untyped-call]

    def detach_(self) -> NamedTensor:
        """As torch's, also for a view, which is what `named` and `rename` give, unless a graph holds that view."""
        with _PLAIN():
            if not self.requires_grad or not self._is_view():
                return cast(NamedTensor, Tensor.detach_(self)) if self.requires_grad else self
            detached = alias(Tensor.detach(self), self.names)
            vars(detached).update(vars(self))
            try:
                swap_tensors(self, detached)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                told = f"detach_ of {show(self)}: a graph or a weak reference holds this view; take x = x.detach()"
                raise NamesError(told) from error
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient, under the names of this tensor."""
        with _PLAIN():
            found: Tensor | None = _Grad.__get__(self)
        return found if found is None else dress(found, self.names)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with _PLAIN():
            _Grad.__set__(self, value if value is None else self._fitting("grad", value))

    @grad.deleter
    def grad(self) -> None:
        with _PLAIN():
            _Grad.__set__(self, None)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """As torch's; the hook's gradient has the names of this tensor."""
        names = self.names
        with _PLAIN():
            return Tensor.register_hook(self, lambda gradient: hook(alias(gradient, names)))  # type: ignore[no-untyped-call]

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As torch's; the names of `gradient` must fit."""
        fitting = gradient if gradient is None else self._fitting("backward", gradient)
        bare(self).backward(bare(fitting), *args, **kwargs)

    def _fitting(self, label: str, gradient: Tensor) -> NamedTensor:
        """A gradient of this tensor, under its names."""
        told(label, self, lambda: unify(self.names, names_of(gradient)))
        return alias(gradient, self.names)

    def permute(self, *dims: Any) -> NamedTensor:
        """As torch's, by names too."""
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
        return cast(NamedTensor, operate(Tensor.permute, (self, tuple(order)), {}))

    def flip(self, *dims: Any) -> NamedTensor:
        """As torch's, by names too."""
        given = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
        return cast(NamedTensor, operate(Tensor.flip, (self, tuple(given)), {}))

    def __format__(self, spec: str) -> str:
        return format(bare(self) if spec and not self.dim() else repr(self), spec)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        with _PLAIN():
            text = Tensor.__repr__(self, **options)  # type: ignore[no-untyped-call]
        return f"{text[:-1]}, {show(self)})"


def _type_of(tensor: NamedTensor) -> str:
    """`Tensor (N=32, C=3)`, for panels."""
    return f"{'Parameter' if isinstance(tensor, torch.nn.Parameter) else 'Tensor'} {show(tensor)}"


describe(NamedTensor, _type_of)


def operate(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives, with names."""
    result, names = dispatch(function, args, kwargs)
    return result if names is None else dress(result, names)


def apply(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `operate`, also of the functions that look after names themselves."""
    own = OWN.get(function)
    if own is None:
        return operate(function, args, kwargs)
    if not args and "input" in kwargs:  # as torch's functions call the tensor
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    return own(*args, **kwargs)


def dress(value: Any, names: Names) -> Any:
    """Give names to a new tensor, or to those in a tuple or list of them. The tensor itself becomes a named one."""
    kind = type(value)
    if kind is Tensor or kind is NamedTensor:
        if len(names) != value.dim():
            raise NamesError(f"a rule gave {listed(names)} to a result of {value.dim()} dimensions: please report it")
        value.__class__ = NamedTensor
        value._dim_names = names
    elif isinstance(value, tuple | list):
        for each in value:
            dress(each, names)
    return value


def _method(function: Function) -> Function:
    @functools.wraps(function)
    def method(self: NamedTensor, *args: Any, **kwargs: Any) -> Any:
        return operate(function, (self, *args), kwargs)

    return method


# torch reads the arguments of its methods before it asks us, and a name is no dimension to it.
for _function, _row in FUNCTIONS.items():
    if _row.dims and getattr(Tensor, _row.name, None) is _function and _row.name not in vars(NamedTensor):
        setattr(NamedTensor, _row.name, _method(_function))


for _name in ("flatten", "unflatten", "detach_", "register_hook", "backward"):
    OWN[getattr(Tensor, _name)] = vars(NamedTensor)[_name]
OWN[torch.flatten], OWN[torch.unflatten] = NamedTensor.flatten, NamedTensor.unflatten
OWN[torch.detach_] = NamedTensor.detach_


def named(tensor: Tensor, *names: Any) -> NamedTensor:
    """The same memory, and graph, with names for its dimensions: `named(x, "N", "C")`; `...` leaves some without.

    A tensor that has names already takes these only where it has none, as `refine_names` does.
    NamesError where their number or form is wrong.
    """
    if isinstance(tensor, NamedTensor):
        return tensor.refine_names(*names)
    return alias(tensor, told("named", tensor, lambda: changes.refined((None,) * tensor.dim(), names)))


def bare(value: Any) -> Any:
    """The same tensor without names, in its graph; anything else as it is."""
    return value.rename(None) if isinstance(value, NamedTensor) else value


def alias(tensor: Tensor, names: Names) -> NamedTensor:
    """The same memory, and graph, under these names."""
    with _PLAIN():
        made = tensor.as_subclass(NamedTensor)
    made._dim_names = names
    return made


def told(label: str, tensor: Tensor, work: Callable[[], Any]) -> Any:
    """What `work` gives; its errors say of what tensor."""
    try:
        return work()
    except NamesError as error:
        raise NamesError(f"{label} of {show(tensor)}: {error}") from None
