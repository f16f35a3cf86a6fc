"""Large data that functions take along: one warning with its size, at the line of the sender."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rpcbench.serialization.diagnostics import WORTH_A_WARNING, data_size
from rpcbench.serialization.pickler import Codec

MB = 1 << 20
LARGE = torch.zeros(5 * MB, dtype=torch.uint8)
SMALL = torch.zeros(3 * MB, dtype=torch.uint8)


def by_value(text: str, **names: Any) -> Any:
    """Return the function `f` of a new cell."""
    cell = {"__name__": "__main__", **names}
    exec(compile(text, "<cell>", "exec"), cell)
    return cell["f"]


def warned(codec: Codec, *functions: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for function in functions:
            codec.encode_value((function, (), {}))
    assert all(Path(warning.filename) == Path(__file__) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: by_value("def f(): return data.sum()", data=LARGE), "'f' takes its global 'data' along, 5.2 MB"),
        (lambda: by_value("f = lambda: [data for _ in range(2)]", data=LARGE), "'<lambda>' takes its global 'data'"),
        (lambda: by_value("def f(x=data): return x", data=LARGE), "'f' takes its default 'x' along, 5.2 MB"),
        (lambda: closure(LARGE), "takes its closure's 'held' along, 5.2 MB"),
        (lambda: closure({"deep": [np.zeros(MB)]}), "takes its closure's 'held' along, 8.4 MB"),
        (lambda: closure(torch.nn.Linear(1000, 2000)), "takes its closure's 'held' along, 8.0 MB"),
        (lambda: closure(b"x" * 6 * MB), "takes its closure's 'held' along, 6.3 MB"),
        (lambda: closure(closure(LARGE)), "takes its closure's 'held' along, 5.2 MB"),
    ],
    ids=["global", "in a comprehension", "default", "closure", "array", "model", "bytes", "function"],
)
def test_a_function_with_large_data_causes_a_warning_with_its_name_and_size(make: Callable[[], Any], said: str) -> None:
    (message,) = [text for text in warned(Codec(), make()) if said in text]
    assert "Make that once on the worker" in message


def closure(held: Any) -> Any:
    return lambda: held


def elsewhere() -> torch.Tensor:
    """This function is sent by name, without its globals."""
    return LARGE


def test_small_data_and_code_by_name_cause_no_warning() -> None:
    model = torch.zeros(10**4, 10**4, device="meta")
    importable = functools.partial(data_size, LARGE)
    assert warned(Codec(), closure(SMALL), closure(model), closure(types), elsewhere, importable) == []
    assert warned(Codec(), closure(elsewhere), closure(importable.func)) == []
    assert warned(Codec(), by_value("def f(): return data.sum()", data=SMALL)) == []


def test_each_version_of_a_function_causes_one_warning() -> None:
    codec = Codec()
    first, same, changed = (
        by_value(text, data=LARGE)
        for text in ("def f(): return data", "def f(): return data", "def f(): return data + 1")
    )
    assert len(warned(codec, first, first, same)) == 1
    assert len(warned(codec, changed)) == 1


def test_the_weight_of_a_value_is_bounded_in_effort_and_ends_in_cycles() -> None:
    around: list[Any] = [LARGE]
    around.append(around)
    assert data_size(around) == data_size([LARGE, LARGE]) == LARGE.nbytes
    assert data_size([bytearray(1) for _ in range(10**6)]) < 10**5
    assert data_size(torch.eye(3).to_sparse()) < WORTH_A_WARNING


class Shy:
    """A key that cannot be shown."""

    def __repr__(self) -> str:
        raise LookupError("not now")


def test_data_that_cannot_be_weighed_is_sent_all_the_same() -> None:
    Codec().encode_value((closure({Shy(): 1}), (), {}))


def test_a_long_container_is_weighed_in_part() -> None:
    class Counted(list[float]):
        seen = 0

        def __iter__(self) -> Iterator[float]:
            for each in super().__iter__():
                Counted.seen += 1
                yield each

    data_size(Counted([1.0] * 100_000))
    assert 0 < Counted.seen < 30_000
