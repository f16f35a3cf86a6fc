"""An accelerator named "fake" with two devices, so that device maps can be tested without one.

Its memory cannot be read by the CPU: its addresses are in inaccessible pages, and only the kernels here know where
the bytes really are. As with a real one, tensors of different devices do not mix, and `fake:0` and `fake:1` are
different devices. Registering it cannot be undone: use it in a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_SIZE = 256 << 20
_DEVICES = 2
_EXTENSION = 12  # DLPack's number for devices it does not know


class _Module:
    """The functions that torch calls in the module of a device type."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return _DEVICES

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        pass


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Memory:
    """Inaccessible pages whose addresses stand for those of accessible pages; memory is never freed."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.start = libc.mmap(None, _SIZE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._real = libc.mmap(
            None, _SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        self._used = 0

    def take(self, size: int) -> int:
        address = self.start + self._used
        self._used += -(-max(size, 1) // 64) * 64
        assert self._used <= _SIZE, "the fake device is full"
        return address

    def real(self, address: int) -> int:
        return address - self.start + self._real


_CODES = {
    **dict.fromkeys([torch.int8, torch.int16, torch.int32, torch.int64], 0),
    **dict.fromkeys([torch.uint8, torch.uint16, torch.uint32, torch.uint64], 1),
    **dict.fromkeys([torch.float16, torch.float32, torch.float64], 2),
    torch.bfloat16: 4,
    torch.complex64: 5,
    torch.complex128: 5,
    torch.bool: 6,
}
"""DLPack's numbers for the kinds of elements."""
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_memory = _Memory()
_kept: list[Any] = []


def _tensor(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `size` elements in new memory of a device."""
    shape, strides = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
    bits = dtype.itemsize * 8
    described = _DLTensor(
        _memory.take(size * dtype.itemsize), _EXTENSION, device.index or 0, 1, _CODES[dtype], bits, 1, shape, strides, 0
    )
    managed = _Managed(described, None, None)
    _kept.append((shape, strides, managed))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch.utils.dlpack.from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))


def _metadata_only(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel that reads no memory: that of the CPU works."""
    return op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else -1
    memory = _tensor(last + 1, dtype, torch.device(device))
    return _metadata_only(_SET, memory, memory.untyped_storage(), 0, size, stride)


def _empty(size: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _empty_strided(size, torch.empty(size, device="meta").stride(), dtype, device)


def _real(tensor: Any) -> Any:
    """The CPU's view of a tensor of the fake device; any other value unchanged."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "fake":
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(_memory.real(storage.data_ptr()))
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _real(target).copy_(_real(source))
    return target


def _computed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any other operation for the device, with the results in its own memory."""
    leaves, _ = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type == "fake"}
    if len(devices) != 1:
        raise RuntimeError(f"{op}: expected all tensors to be on the same device, found {sorted(map(str, devices))}")
    originals = {}

    def enter(leaf: Any) -> Any:
        real = _real(leaf)
        if real is not leaf:
            originals[id(real)] = (real, leaf)
        return real

    def leave(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        original = originals[id(leaf)][1] if id(leaf) in originals else None
        if original is not None and original.shape == leaf.shape:
            return original
        made = _copy_from(leaf, _empty_strided(leaf.shape, leaf.contiguous().stride(), leaf.dtype, *devices))
        if original is None:
            return made
        return _metadata_only(_SET, original, made.untyped_storage(), 0, made.shape, made.stride())  # resized

    real_args, real_kwargs = tree_map(enter, (args, kwargs))
    if "device" in real_kwargs:
        real_kwargs["device"] = torch.device("cpu")
    return tree_map(leave, op(*real_args, **real_kwargs))


aten = torch.ops.aten
_libraries: list[Any] = []


def register() -> None:
    """Make the device known to torch in this process."""
    _setup_privateuseone_for_python_backend("fake", _Module())
    ours, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    ours.impl("empty.memory_format", _empty, "PrivateUse1")
    ours.impl("empty_strided", _empty_strided, "PrivateUse1")
    ours.impl("_copy_from", _copy_from, "PrivateUse1")
    for op in (
        *(aten.view.default, aten.view.dtype, aten.as_strided.default, aten._reshape_alias.default),
        *(_SET, aten.set_.source_Storage, aten.set_.source_Tensor),
    ):
        ours.impl(op, functools.partial(_metadata_only, op), "PrivateUse1")
    rest.fallback(_computed, "PrivateUse1")
    _libraries.extend([ours, rest])
