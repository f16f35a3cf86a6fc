"""How parts of torch are replaced while a rank is played.

Guarantees
- At the end of the block an attribute is as before: also one that was inherited, and not its holder's own.
- No mode sees a function that runs with data: it is no work of the rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def replace_attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute within the block."""
    own = vars(holder)
    is_own, before = name in own, own.get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(holder, name, before)
        else:
            delattr(holder, name)


@contextlib.contextmanager
def replace_attributes(holder: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes within the block, by name."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(replace_attribute(holder, name, value))
        yield


def run_with_data(found: Any) -> Any:
    """Return a method that computes with data: outside of the modes of a played rank.

    A result without data that the program hands in again is made anew: the ranks of a mesh, in their order.
    """
    function = found.__func__ if isinstance(found, staticmethod) else found

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            for name, value in options.items():
                if isinstance(value, FakeTensor):  # the ranks, which `init_device_mesh` has counted within the mode
                    options[name] = torch.arange(value.numel())
            return function(*args, **options)

    return staticmethod(run) if isinstance(found, staticmethod) else run
