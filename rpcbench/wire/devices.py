"""Tensors on accelerators: where they go on the other side, and their bytes on the way there and back.

Bytes travel through the CPU: copied there before they are sent, and to their device before anything refers to them.
Both copies wait for their end. The first begins after what the sending thread has queued on its current stream, so
streams are in step: what is received is complete on every stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rpcbench.base.errors import ProtocolError, SerializationError

Name = int | str | torch.device
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Route:
    """The way to one worker: device here -> device there. Tensors on the CPU stay there if nothing else is said.

    `refusal` is the error for a tensor on a device that is not named, after a mention of that device.
    """

    targets: Mapping[torch.device, torch.device]
    refusal: str

    def target(self, device: torch.device) -> str | None:
        """Name of the device over there; None for the CPU. SerializationError where there is no way."""
        there = self.targets.get(device, CPU if device == CPU else None)
        if there is None:
            raise SerializationError(f"a tensor on {device} has no way to its destination. {self.refusal}")
        return None if there == CPU else str(there)


CPU_ONLY = Route({}, "Send t.cpu(), and move it to a device on the other side.")


def device_of(name: Name) -> torch.device:
    """A device by its name or number, with an index if it is an accelerator: "cuda" is "cuda:0". RuntimeError for no
    device."""
    device = torch.device(name)
    if device.type == "cpu":
        return CPU
    return device if device.index is not None else torch.device(device.type, 0)


def fetched(storage: torch.UntypedStorage, start: int, size: int) -> torch.UntypedStorage:
    """A copy, on the CPU, of these bytes of a device's memory."""
    window = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))
    return window.cpu().untyped_storage()


def placed(memory: bytearray | memoryview, device: torch.device) -> torch.UntypedStorage:
    """These bytes in memory of a device; on the CPU that is the same memory."""
    return torch.frombuffer(memory, dtype=torch.uint8).to(device).untyped_storage()


def here(name: object) -> torch.device:
    """The device that a peer has named. ProtocolError for what is no name; SerializationError where it is not here."""
    try:
        device = torch.device(str(name)) if type(name) is str else None
    except RuntimeError:
        device = None
    if device is None:
        raise ProtocolError(f"the peer sent a tensor for {name!r}, which is no device")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on how it was built
        raise SerializationError(
            f"a tensor came for {device}, which this worker does not have: mend the device map. {error}"
        ) from error
