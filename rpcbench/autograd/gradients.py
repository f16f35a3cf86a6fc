"""The gradients of this worker's leaves in one context; `.grad` of no tensor is touched.

Guarantees
- A gradient is the context's own: changing one in place changes no other, nor anything that a hook has kept a view of.
- Gradients add up from passes on any threads; what was handed out before does not change.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

Leaves = Sequence[tuple[Tensor, Tensor]]
_NAMELESS: frozenset[type] = frozenset((Tensor, Parameter))


class LeafGradients:
    """Leaf tensor → gradient."""

    def __init__(self) -> None:
        self._held: dict[Tensor, Tensor] = {}
        self._adding = threading.RLock()  # an RLock: freeing a tensor may run a finalizer that comes back here

    def __len__(self) -> int:
        return len(self._held)

    def leaves(self) -> list[Tensor]:
        """Those that have a gradient here. Waits for nobody."""
        return list(self._held)

    def copy(self) -> dict[Tensor, Tensor]:
        """All as they are now."""
        with self._adding:
            return dict(self._held)

    def under_names(self) -> dict[Tensor, Tensor]:
        """All as they are now, each with names for its dimensions where its leaf has some."""
        held = self.copy()
        if _NAMELESS.issuperset(map(type, held)):
            return held
        return {leaf: _named(leaf, gradient) for leaf, gradient in held.items()}

    def add(self, leaves: Leaves) -> None:
        """Add gradients of leaves to those that are here."""
        own, held = _own(leaves), self._held
        with self._adding:
            for leaf, gradient in own:
                if leaf in held:
                    with torch.no_grad():
                        gradient = total(held[leaf], gradient)
                held[leaf] = gradient

    def replace(self, leaves: Leaves) -> None:
        """Take these gradients in place of those that are here."""
        own = _own(leaves)
        with self._adding:
            self._held.update(own)

    def scale(self, leaves: Iterable[Tensor], factor: float) -> None:
        """Multiply the gradients of these leaves, as far as they are here."""
        with self._adding, torch.no_grad():
            self._held.update((leaf, self._held[leaf] * factor) for leaf in leaves if leaf in self._held)


def _named(leaf: Tensor, gradient: Tensor) -> Tensor:
    if type(leaf) in _NAMELESS:
        return gradient
    from rpcbench.named.gradients import like  # loaded already where a leaf has names; nobody else waits for it

    return like(leaf, gradient)


def total(first: Tensor, second: Tensor) -> Tensor:
    """The sum. torch adds sparse to dense, and not dense to sparse."""
    return first + second if first.layout is torch.strided else second + first


def _own(leaves: Leaves) -> Leaves:
    """The gradients, each in memory that no other of them uses and without gaps; copied only where it must be."""
    memories = [g.untyped_storage()._cdata for _, g in leaves if g.layout is torch.strided and g.is_contiguous()]
    if len(set(memories)) == len(leaves):  # as a rule
        return leaves
    uses = Counter([_memory(grad) for _, grad in leaves])
    return [
        (leaf, grad if uses[_memory(grad)] == 1 and _compact(grad, leaf) else _copied(grad)) for leaf, grad in leaves
    ]


def _memory(grad: Tensor) -> int:
    """Names the memory of the elements."""
    values = grad if grad.layout is torch.strided else _elements(grad)[0]
    name: int = values.untyped_storage()._cdata
    return name


def _compact(grad: Tensor, leaf: Tensor) -> bool:
    if grad.layout is torch.strided:
        return grad.is_contiguous() or grad.stride() == leaf.stride()
    return all(part.is_contiguous() for part in _elements(grad))


def _copied(grad: Tensor) -> Tensor:
    return grad.clone(memory_format=torch.contiguous_format) if grad.layout is torch.strided else grad.clone()


def _elements(grad: Tensor) -> tuple[Tensor, ...]:
    if grad.layout is torch.sparse_coo:
        return grad._values(), grad._indices()
    return (grad.values(),)
