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
        return {leaf: _named(leaf, gradient) for leaf, gradient in self.copy().items()}

    def add(self, leaves: Leaves) -> None:
        """Add gradients of leaves to those that are here."""
        own = _own(leaves)
        with self._adding:
            for (leaf, _), gradient in zip(leaves, own, strict=True):
                before = self._held.get(leaf)
                if before is not None:
                    with torch.no_grad():
                        gradient = total(before, gradient)
                self._held[leaf] = gradient

    def replace(self, leaves: Leaves) -> None:
        """Take these gradients in place of those that are here."""
        own = _own(leaves)
        with self._adding:
            self._held.update((leaf, gradient) for (leaf, _), gradient in zip(leaves, own, strict=True))

    def scale(self, leaves: Iterable[Tensor], factor: float) -> None:
        """Multiply the gradients of these leaves, as far as they are here."""
        with self._adding, torch.no_grad():
            self._held.update((leaf, self._held[leaf] * factor) for leaf in leaves if leaf in self._held)


def _named(leaf: Tensor, gradient: Tensor) -> Tensor:
    if type(leaf) is Tensor or type(leaf) is Parameter:
        return gradient
    from rpcbench.named.gradients import like  # loaded already where a leaf has names; nobody else waits for it

    return like(leaf, gradient)


def total(first: Tensor, second: Tensor) -> Tensor:
    """The sum. torch adds sparse to dense, and not dense to sparse."""
    return first + second if first.layout is torch.strided else second + first


def _own(leaves: Leaves) -> list[Tensor]:
    """The gradients, each in memory that no other of them uses and without gaps; copied only where it must be."""
    memories = [_memory(grad) for _, grad in leaves]
    if len(set(memories)) == len(memories):
        return [grad if _compact(grad, leaf) else _copied(grad) for leaf, grad in leaves]
    uses = Counter(memories)
    return [
        grad if uses[memory] == 1 and _compact(grad, leaf) else _copied(grad)
        for (leaf, grad), memory in zip(leaves, memories, strict=True)
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
