"""Options of `init_rpc`, with torch's names.

There is one backend here; the classes exist so that programs keep working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch

from rpcbench.base.config import WorldConfig
from rpcbench.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from rpcbench.serialization.tensor_types import CPU, Name, device_of


class RpcBackendOptions:
    """`rpc_timeout` in seconds (0: none) for calls that name none, and the URL where the workers of a world meet."""

    def __init__(
        self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD, **kwargs: Any
    ) -> None:
        if kwargs:
            raise TypeError(f"no such option: {', '.join(kwargs)}")
        _check("rpc_timeout is in seconds", rpc_timeout, Real)
        _check("init_method is a URL", init_method, str)
        if rpc_timeout < 0:
            raise RuntimeError(f"RPC Timeout must be non-negative; got {rpc_timeout}")
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method

    def _completed(self, config: WorldConfig) -> WorldConfig:
        """The configuration of a member with what these options say besides."""
        return config


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """As `RpcBackendOptions`, with the number of threads that run calls, and ways for tensors on accelerators.

    device_maps: for calls of each worker, by its name, the device here (number, name or torch.device) and the device
    there; answers and gradients go the other way. A tensor on a device that is not named makes a call fail; the CPU
    may be named, and need not be. ValueError where two devices go to one. devices: the accelerators that calls of this
    worker may use; by default all. `init_rpc` checks that all workers' maps fit the devices there are: ValueError on
    all of them.

    same_modes: calls of this worker run under the grad mode and autocast of the thread that makes them; torch's do not.

    `_transports` and `_channels` name parts of torch's own transport; they are accepted and have no effect.
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
        _check("num_worker_threads is a whole number", num_worker_threads, Integral)
        if num_worker_threads <= 0:
            raise RuntimeError(f"num_worker_threads must be positive, got {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.same_modes = same_modes
        self.device_maps = {to: _map(pairs) for to, pairs in (device_maps or {}).items()}
        self.devices: list[torch.device] = []
        self.set_devices(devices or [])

    def set_device_map(self, to: str, device_map: Mapping[Any, Name]) -> None:
        """Add to the device map for calls of worker `to`. ValueError where a device there goes elsewhere already."""
        added, known = _map(device_map), self.device_maps.setdefault(to, {})
        for here, there in added.items():
            if known.get(here, there) != there:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping: {here} goes to {known[here]}, so not to {there}"
                )
        known.update(added)

    def set_devices(self, devices: Sequence[Name]) -> None:
        """Name the accelerators that calls of this worker may use. ValueError for the CPU, which they always may."""
        found = [device_of(device) for device in devices]
        if CPU in found:
            raise ValueError("`set_devices` expect a list of CUDA devices, but got device type cpu: name accelerators")
        self.devices = found

    def _completed(self, config: WorldConfig) -> WorldConfig:
        maps = {to: {str(a): str(b) for a, b in pairs.items()} for to, pairs in self.device_maps.items()}
        devices = tuple(map(str, self.devices))
        return replace(config, device_maps=maps, devices=devices, same_modes=self.same_modes)


def _check(what: str, value: object, kind: type) -> None:
    """TypeError, with torch's words, for a value of another kind; a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"incompatible constructor arguments: {what}, not {value!r}")


def _map(pairs: Mapping[Any, Name]) -> dict[torch.device, torch.device]:
    found: dict[torch.device, torch.device] = {}
    for here, there in ((device_of(a), device_of(b)) for a, b in pairs.items()):
        if there in found.values():
            raise ValueError(f"`device_map` only supports 1-to-1 mapping: more than one device goes to {there}")
        found[here] = there
    return found


# torch's names for what is the same here
_is_tensorpipe_available = True
_TensorPipeRpcBackendOptionsBase = TensorPipeRpcBackendOptions
