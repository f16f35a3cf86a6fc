"""Packers are reused, by one caller at a time."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import msgpack
import pytest

from rpcbench.wire import encoding
from rpcbench.wire.encoding import packed

DATA = {"numbers": [*range(50)], "text": ["a" * n for n in range(50)], "bytes": b"b" * 1000}


@pytest.fixture
def collecting() -> Iterator[list[bytes]]:
    """Make each garbage collection pack a value, and let other threads run."""
    before, inner = gc.get_threshold(), []

    def collects(phase: str, info: object) -> None:
        if phase == "start":
            inner.append(packed([1, 2, 3]))
            time.sleep(0)

    gc.callbacks.append(collects)
    gc.set_threshold(5)
    yield inner
    gc.set_threshold(*before)
    gc.callbacks.remove(collects)


class _Makes(dict[str, object]):
    """A dict that allocates memory while it is packed, so that a garbage collection may run."""

    def items(self) -> list[tuple[str, object]]:  # type: ignore[override]
        return [(key, [value, [[] for _ in range(20)]]) for key, value in super().items()]


def test_a_pack_inside_another_pack_uses_another_packer(collecting: list[bytes]) -> None:
    wrong: list[bytes] = []

    def pack() -> None:
        for _ in range(100):
            result = packed(_Makes(DATA))
            if msgpack.unpackb(result).keys() != DATA.keys():
                wrong.append(result)

    threads = [threading.Thread(target=pack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert collecting and set(collecting) == {msgpack.packb([1, 2, 3])}
    assert encoding._idle, "packers are kept for reuse"


def test_a_packer_that_has_failed_is_not_reused() -> None:
    packed(1)
    before = [*encoding._idle]
    with pytest.raises(TypeError):
        packed(["something", object()])
    assert before[-1] not in encoding._idle and msgpack.unpackb(packed(DATA)) == DATA
