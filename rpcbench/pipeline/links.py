"""A model as a row of modules, each under its name in the un-split model, with the names of what it takes and gives.

Guarantees: the row has every module that runs, in the order in which they run, one that is used twice twice; a chain in
the row is taken apart, as long as it does nothing but run its modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.dimensions import Stated, Terms, Values, stated

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A module of a list, with names for what it takes and gives, and for their dimensions. Made by `part`."""

    module: nn.Module
    takes: Names | None
    gives: Names | None
    dims_taken: Stated
    dims_given: Stated


@dataclass(frozen=True, slots=True)
class Link:
    """One module of the row. `takes` None: what the one before gives; `gives` None: one value without a name.

    `prefix`: what the un-split model puts before the names of its parameters; None: the name and a dot.
    """

    name: str
    module: nn.Module
    takes: Names | None = None
    gives: Names | None = None
    prefix: str | None = None
    dims_taken: Stated = field(default_factory=dict)
    dims_given: Stated = field(default_factory=dict)

    @property
    def keys(self) -> str:
        """What the un-split model puts before the names of the module's parameters and buffers."""
        return f"{self.name}." if self.prefix is None else self.prefix

    @property
    def terms(self) -> Terms:
        return Terms(self.name, self.takes, self.gives, self.dims_taken, self.dims_given)


Model = nn.Module | Sequence[nn.Module | Part] | Mapping[str, nn.Module | Part]


def part(module: nn.Module, takes: Values | None = None, gives: Values | None = None) -> Part:
    """A module for a list given to `split`, with names for what it takes and gives.

    It is called with the values of these names, in their order: each is the latest that a module before it has given
    under this name, or the model's input. It returns one value, or as many as it has names for: a tuple in their order,
    or a dict. Without `takes` it gets all that the module before it gives; without `gives` it gives one value that only
    the next module can take. Values are tensors of any type and shape, and plain numbers.

    A dict states the names of dimensions as well, of `rpcbench.named`, or None for a value that it says nothing of:

        part(encode, takes={"x": ("N", "T")}, gives={"h": ("N", "T", "E"), "mask": None})

    A value that comes, or that the module gives, has these names then: a dimension without a name gets it, and one of
    another name is a PipelineError. None in a tuple is a dimension that stays without.
    """
    names_taken, names_given = _checked("takes", takes), _checked("gives", gives)
    return Part(module, names_taken, names_given, stated("takes", takes), stated("gives", gives))


def _checked(what: str, names: Values | None) -> Names | None:
    if names is None:
        return None
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise PipelineError(f'{what} must be a list of names as {what}=("h",), not {names!r}')
    if what == "gives" and len(set(names)) < len(names):
        raise PipelineError(f"gives={tuple(names)!r} has a name twice")
    return tuple(names)


def children(model: Model) -> list[Link]:
    """The modules to be run in turn, chains as one. `named_children` would leave out the second use of a module."""
    named: list[tuple[str, object]]
    if isinstance(model, nn.ModuleList | list | tuple):
        named = [(str(index), item) for index, item in enumerate(model)]
    elif isinstance(model, Mapping):
        named = [(str(name), item) for name, item in model.items()]
    elif isinstance(model, nn.Module) and _is_chain(model):
        named = [(name, module) for name, module in model._modules.items() if module is not None]
    else:
        raise PipelineError(
            f"{type(model).__name__} cannot be cut: it is no plain nn.Sequential, so the order of its modules is not "
            "known. Give split() an nn.Sequential, a list of modules to be run one after the other, or what "
            "traced(model, x) gives, which follows its forward"
        )
    return [_link(name, item) for name, item in named]


def _link(name: str, item: object) -> Link:
    module = item.module if isinstance(item, Part) else item
    if not isinstance(module, nn.Module):
        raise PipelineError(f"item {name} of the list is {module!r}, not a torch.nn.Module")
    if not isinstance(item, Part):
        return Link(name, module)
    return Link(name, module, item.takes, item.gives, dims_taken=item.dims_taken, dims_given=item.dims_given)


def expanded(child: Link) -> list[Link]:
    """The child, or what it chains: the first of these takes what the child takes, the last gives what it gives."""
    found = list(_walk(child.name, child.module))
    found[0] = replace(found[0], takes=child.takes, dims_taken=child.dims_taken)
    found[-1] = replace(found[-1], gives=child.gives, dims_given=child.dims_given)
    return found


def _walk(name: str, module: nn.Module) -> Iterator[Link]:
    if not _is_chain(module) or not len(module._modules):
        yield Link(name, module)
        return
    for own, child in module._modules.items():
        if child is not None:
            yield from _walk(f"{name}.{own}", child)


def _is_chain(module: nn.Module) -> bool:
    """An nn.Sequential that does nothing but run its modules: no forward of its own, no hooks, no parameters."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    own = (module._parameters, module._buffers)
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not any(hooks + own)
