"""What a computation keeps for its backward, and what it holds at each moment: counted in bytes, for lessons 26 and 35.

`Kept` counts what autograd saves for backward, by the part of the model that saves it. `Meter` counts all tensors that
are alive, operation by operation. Both count a piece of memory once, however many tensors lie in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kept:
    """Counts what autograd saves while this is entered: `kept.bytes` for each part of the model, by its name.

    Args:
        model: Its parameters are not counted. What it saves counts for the innermost module that runs.
        known: Tensors that are not counted either, such as the input.
    """

    def __init__(self, model: nn.Module, known: Iterable[Tensor] = ()) -> None:
        self.bytes: dict[str, int] = {}
        self._seen = {place_of(each) for each in (*model.parameters(), *known)}
        self._running = [""]
        self._model = model
        self._hooks: list[Any] = []

    def __enter__(self) -> Kept:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            self._hooks.append(module.register_forward_hook(self._left))
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._saved.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._saved.__exit__(kind, error, traceback)
        for hook in self._hooks:
            hook.remove()

    def _left(self, *_: object) -> None:
        self._running.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        place = place_of(tensor)
        if place not in self._seen:
            self._seen.add(place)
            part = self._running[-1]
            self.bytes[part] = self.bytes.get(part, 0) + tensor.untyped_storage().nbytes()
        return tensor

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that operators have made since it was entered and that are still alive.

    `curve` has them after each operation, `peak` is the most. Views and changes in place make no memory. Memory that an
    operator was only given is not counted: gloo has buffers of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.curve: list[int] = []
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Meter:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda memory, size: self._resize_and_count(memory, size)  # as FSDP frees
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor, whose pieces come here by themselves
        result = func(*args, **(kwargs or {}))
        is_new = "lift" in func._opname  # `torch.tensor(1.0)`: made by no operator
        given = set() if is_new else {place._cdata for place in _memory((args, kwargs))}
        for place in _memory(result):
            if place._cdata not in given | self._sizes.keys():
                weakref.finalize(place, self._count, place._cdata, None)
                self._count(place._cdata, place.nbytes())
        self.curve.append(self.alive)
        return result

    def _resize_and_count(self, place: torch.UntypedStorage, size: int) -> Any:
        result = self._resize(place, size)
        if place._cdata in self._sizes:
            self._count(place._cdata, size)
        return result

    def _count(self, number: int, size: int | None) -> None:
        self.alive += (size or 0) - self._sizes.pop(number, 0)
        if size is not None:
            self._sizes[number] = size
        self.peak = max(self.peak, self.alive)


def _memory(values: Any) -> Iterator[torch.UntypedStorage]:
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return (each.untyped_storage() for each in tensors if not hasattr(each, "__tensor_flatten__"))


class Counted(nn.Module):
    """A stage of a pipeline, which counts how many bytes autograd keeps for it.

    `Counted.most` is the largest number so far of all such stages in this process.
    """

    alive = 0
    most = 0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        seen = {place_of(each) for each in (x, *self.inner.parameters())}

        def pack(tensor: Tensor) -> _Box:
            box = _Box(tensor)
            if place_of(tensor) not in seen:
                seen.add(place_of(tensor))
                size = tensor.untyped_storage().nbytes()
                Counted.alive += size
                Counted.most = max(Counted.most, Counted.alive)
                weakref.finalize(box, Counted._freed, size)
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            return self.inner(x)

    @staticmethod
    def _freed(size: int) -> None:
        Counted.alive -= size


class _Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
