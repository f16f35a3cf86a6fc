"""Print each name of torch's modules that `rpcbench run` binds, beside its replacement; for tests/test_rebind.py.

One line of JSON for each: module, name, the kind of torch's value ("class", "function", "constant", "state"), the kind
once bound (the same words, "refuses" for one that raises with its name, or "absent"), and the text of that error.
"""

from __future__ import annotations

import importlib
import json
import types
from typing import Any

from rpcbench import torch_shim

CONSTANTS = (str, int, float, tuple, type(None))


def kind(value: Any) -> str:
    if isinstance(value, type):
        return "class"
    return "constant" if isinstance(value, CONSTANTS) else "function" if callable(value) else "state"


def names(module: types.ModuleType) -> dict[str, Any]:
    """All names but modules and imports from elsewhere."""
    homes = {*torch_shim._MODULES, "builtins", None}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("__")
        and not isinstance(value, types.ModuleType)
        and (getattr(value, "__module__", None) in homes)
    }


def refusal(value: Any) -> str:
    """The text of the error that a refusing value raises when it is called; empty for other values."""
    if not isinstance(value, torch_shim._NotOffered):
        return ""
    try:
        value(1)
    except NotImplementedError as error:
        return str(error)
    return ""


theirs = {module: names(importlib.import_module(module)) for module in torch_shim._MODULES}
torch_shim.bind_modules()
for module, there in theirs.items():
    here = importlib.import_module(module)
    for name, value in there.items():
        found = getattr(here, name, here)
        words = refusal(found)
        now = "absent" if found is here else "refuses" if words else kind(found)
        print(json.dumps([module, name, kind(value), now, words]))
