"""Options of `init_rpc`, with torch's names. There is one backend; the classes exist so that programs keep working."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch

from rpcbench.base.config import WorldConfig
from rpcbench.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from rpcbench.serialization.tensor_types import CPU, Name, device_of

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions"]


class RpcBackendOptions:
    """Options of any backend.

    Args:
        rpc_timeout: Timeout in seconds of calls that name none; 0 for no limit.
        init_method: URL where the workers of a world meet.

    Raises:
        TypeError: A value has a wrong type, or an option does not exist.
        RuntimeError: The timeout is negative.
    """

    def __init__(
        self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD, **kwargs: Any
    ) -> None:
        if kwargs:
            raise TypeError(f"no such option: {', '.join(kwargs)}")
        _check_type("rpc_timeout is in seconds", rpc_timeout, Real)
        _check_type("init_method is a URL", init_method, str)
        if rpc_timeout < 0:
            raise RuntimeError(f"RPC Timeout must be non-negative; got {rpc_timeout}")
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method

    def _complete_config(self, config: WorldConfig) -> WorldConfig:
        """Return the configuration of a member, completed from these options."""
        return config  # the timeout and the URL are in it already


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """`RpcBackendOptions` with the number of threads that run calls, and device maps for tensors on accelerators.

    `init_rpc` checks that the maps of all workers fit their devices, and else raises ValueError on all workers.

    Args:
        num_worker_threads: Number of threads that run calls.
        rpc_timeout: Timeout in seconds of calls that name none; 0 for no limit.
        init_method: URL where the workers of a world meet.
        device_maps: For each callee, by its name: device here -> device there, each a number, name or torch.device.
            Replies and gradients use the reverse map. A call fails with a tensor on a device without an entry; the CPU
            needs none.
        devices: The accelerators that calls of this worker may use; by default all.
        same_modes: Run calls of this worker under the autocast of the calling thread, too; torch does not.
        _transports: Part of torch's own transport; accepted without effect.
        _channels: As `_transports`.

    Raises:
        TypeError: A value has a wrong type.
        RuntimeError: The number of threads is not positive, or the timeout negative.
        ValueError: Two devices map to one.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Any, Name]] | None = None,
        devices: Sequence[Name] | None = None,
        same_modes: bool = False,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        _check_type("num_worker_threads is a whole number", num_worker_threads, Integral)
        if num_worker_threads <= 0:
            raise RuntimeError(f"num_worker_threads must be positive, got {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.same_modes = same_modes
        self.device_maps = {to: _make_device_map(pairs) for to, pairs in (device_maps or {}).items()}
        self.devices: list[torch.device] = []
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: Mapping[Any, Name]) -> None:
        """Add entries to the device map for calls of a worker.

        Args:
            to: Name of the worker.
            device_map: Device here -> device there, each a number, name or torch.device.

        Raises:
            ValueError: A device has another entry already.
        """
        added, known = _make_device_map(device_map), self.device_maps.setdefault(to, {})
        for here, there in added.items():
            if known.get(here, there) != there:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping: {here} maps to {known[here]}, so not to {there}"
                )
        known.update(added)

    def set_devices(self, devices: Sequence[Name]) -> None:
        """Set the accelerators that calls of this worker may use. Raises ValueError for the CPU, always permitted."""
        found = [device_of(device) for device in devices]
        if CPU in found:
            raise ValueError("`set_devices` expect a list of CUDA devices, but got device type cpu: name accelerators")
        self.devices = found

    def _complete_config(self, config: WorldConfig) -> WorldConfig:
        # As text: WorldConfig is plain data, without objects of torch.
        maps = {to: {str(a): str(b) for a, b in pairs.items()} for to, pairs in self.device_maps.items()}
        devices = tuple(map(str, self.devices))
        return replace(config, device_maps=maps, devices=devices, same_modes=self.same_modes)


def _check_type(what: str, value: object, kind: type) -> None:
    """Raise TypeError, with torch's text, for a value of another type."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"incompatible constructor arguments: {what}, not {value!r}")


def _make_device_map(pairs: Mapping[Any, Name]) -> dict[torch.device, torch.device]:
    found: dict[torch.device, torch.device] = {}
    for here, there in ((device_of(a), device_of(b)) for a, b in pairs.items()):
        if there in found.values():
            raise ValueError(f"`device_map` only supports 1-to-1 mapping: more than one device maps to {there}")
        found[here] = there
    return found


# torch has a base class in C++, and a test for its presence; here they are one class that always exists
_is_tensorpipe_available = True
_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions
