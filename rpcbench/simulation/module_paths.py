"""The module of a model that runs now, also in a backward pass.

Guarantees
- In a forward pass, and in one that is run again, it is the innermost module that is being called.
- In a backward pass it is the module whose output's gradient came last. After the gradient of a module's input it is
  the module around it.
- After `__exit__` no hook is left. No module is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


class ModuleWatch:
    """Follows the modules of all models of this process."""

    def __init__(self, model_found: Callable[[nn.Module], None]) -> None:
        self._model_found = model_found  # called with each outermost module, when it is called first
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.called: set[int] = set()  # ids of outermost modules that were called since `called.clear()`
        self._running: list[str] = []  # of a forward pass, outermost first
        self._in_backward = ""
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ModuleWatch:
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def current_path(self) -> str:
        """Return the path of the module that runs."""
        if self._running:
            return self._running[-1]
        return self._in_backward if torch._C._current_graph_task_id() != -1 else ""

    @property
    def is_in_forward(self) -> bool:
        """Whether a module is being called."""
        return bool(self._running)

    def begin_backward(self) -> None:
        """Forget the last backward pass."""
        self._in_backward = ""

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if module not in self._paths:
            self._model_found(module)
            for name, inner in module.named_modules():
                self._paths.setdefault(inner, _clean_path(name))
        if not self._paths[module]:
            self.called.add(id(module))
        outer = self._running[-1] if self._running else ""
        self._running.append(self._paths[module])
        self._watch_gradients(args, outer)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._watch_gradients(output, self._running.pop())

    def _watch_gradients(self, values: Any, path: str) -> None:
        """When the gradient of a value has come, the module at `path` runs."""

        def enter(gradient: Tensor) -> None:
            self._in_backward = path

        for each in tree_leaves(values):
            if isinstance(each, Tensor) and each.requires_grad and each.grad_fn is not None:
                each.grad_fn.register_prehook(lambda gradients: enter(gradients[0]))


def _clean_path(name: str) -> str:
    parts = [each for each in name.split(".") if each not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)
