"""Operators of torch.ops by name, as the parts of a traced model carry them to workers.

Guarantees
- A worker that has not registered an operator imports the module that did so in the process of the notebook. Where that
  does not help, the error names operator, worker and module, and the remedy.
- An operator is found again by its name alone; nothing of it is pickled.
"""

# torch does not note which module registers an operator. A decorator keeps the function, and with it the module's name.
# For the others torch notes the file and line of a registration, of the operator or of its "fake" kernel. An operator
# in C++ has a file of C++ there; its namespace often has the name of the package, as that of torchvision.

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._library import custom_ops, simple_registry

from rpcbench.base.errors import PipelineError
from rpcbench.runtime import current

_WITH_TORCH = frozenset({"aten", "prim", "prims", "higher_order"})
"""Namespaces that each process has."""
_FOR_OTHERS = frozenset({torch.library.__name__, custom_ops.__name__})


@dataclass(frozen=True, slots=True)
class OperatorName:
    """The path of an operator in torch.ops, as "aten.add.Tensor". `module`: the one that registers it; "": unknown."""

    path: str
    module: str = ""

    @staticmethod
    def from_overload(op: torch._ops.OpOverload) -> OperatorName:
        """Return the name of an operator of this process."""
        return OperatorName(str(op), "" if op.namespace in _WITH_TORCH else _module_of(op))

    def find_operator(self) -> Any:
        """Return the operator; import its module if it is not registered. PipelineError where that does not help."""
        find = operator.attrgetter(self.path)
        try:
            return find(torch.ops)
        except AttributeError:
            failure: Exception | None = None
        if self.module not in ("", "__main__"):
            try:
                importlib.import_module(self.module)
                return find(torch.ops)
            except Exception as error:  # noqa: BLE001  (any error of the module; the cause of the one below)
                failure = error
        raise PipelineError(self._missing_text()) from failure

    def _missing_text(self) -> str:
        agent = current.find_current()
        where = "this process" if agent is None else agent.name
        if self.module == "__main__":
            remedy = "run the cell or the lines that define it there, too, as by %%remote all"
        elif self.module:
            remedy = f"the module {self.module} registers it, and must be there, too"
        else:
            remedy = "import the library that registers it there, as by %%remote all"
        return f"the traced model uses the operator {self.path}, which {where} has not registered: {remedy}"


@cache  # it looks at all loaded modules
def _module_of(op: torch._ops.OpOverload) -> str:
    """Return the name of the module that has registered an operator here, "" if none is found."""
    defined = custom_ops.OPDEFS.get(op._schema.name)
    if defined is not None:
        return str(defined._init_fn.__module__)
    loaded = [(getattr(module, "__file__", None), name) for name, module in list(sys.modules.items())]
    files = {file: name for file, name in loaded if file and name not in _FOR_OTHERS}
    found = next((files[file] for file in _registered_at(op) if file in files), "")
    return found or (op.namespace if op.namespace in sys.modules else "")


def _registered_at(op: torch._ops.OpOverload) -> Iterator[str]:
    """Yield the files in which an operator, or its kernel for fake tensors, is registered."""
    name = op._schema.name
    for line in torch._C._dispatch_dump(name).splitlines():
        if line.startswith("debug: registered at "):
            yield line.removeprefix("debug: registered at ").rpartition(":")[0]
    for kernel in simple_registry.singleton.find(name).fake_impl.kernels:
        yield kernel.source.rpartition(":")[0]
