"""The process groups of a simulated rank: whatever backend a program names, they move nothing.

Guarantees
- Within the block `init_process_group`, `new_group` and the groups of a mesh make groups of torch's backend "fake", in
  the world of the simulation; no port is opened, and no other process is sought.
- Objects that ranks send to each other are data: a rank gets from each what it gives itself. Where it gives none, a
  SimulationError names the line.
- A program that starts ranks itself gets a SimulationError.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as c10d
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from rpcbench.base.errors import SimulationError
from rpcbench.distributed.call_sites import calling_site
from rpcbench.simulation.patches import replace_attribute, replace_attributes

_BACKEND = "fake"


class NcclWithoutGpus:
    """Stands for `ProcessGroupNCCL` where torch was built without it: its options have no effect here."""

    class Options(SimpleNamespace):
        """Takes any option."""

        def __init__(self, **options: Any) -> None:
            super().__init__(config=SimpleNamespace(), **options)


@contextlib.contextmanager
def make_groups_fake(rank: int, size: int) -> Iterator[None]:
    """Make the process groups of rank `rank` of `size` within the block."""
    changed: dict[str, Any] = {
        "init_process_group": _init_as(rank, size), "monitored_barrier": _pass_barrier,
        "all_gather_object": _gather_object_from_all, "gather_object": _gather_object,
        "broadcast_object_list": _broadcast_objects, "scatter_object_list": _scatter_objects,
        "send_object_list": _send_objects, "recv_object_list": _receive_objects,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(replace_attributes(c10d, changed))
        stack.enter_context(replace_attributes(distributed_c10d, changed))
        stack.enter_context(replace_attribute(device_mesh, "init_process_group", changed["init_process_group"]))
        timeout = distributed_c10d.default_pg_timeout
        stack.enter_context(replace_attribute(distributed_c10d, "default_pg_nccl_timeout", timeout))
        helper = _with_fake_backend(distributed_c10d._new_process_group_helper)
        stack.enter_context(replace_attribute(distributed_c10d, "_new_process_group_helper", helper))
        if not c10d.is_nccl_available():
            stack.enter_context(replace_attribute(c10d, "ProcessGroupNCCL", NcclWithoutGpus))
        spawning = sys.modules["torch.multiprocessing.spawn"]
        stack.enter_context(replace_attribute(spawning, "start_processes", _refuse_processes))
        yield


def _init_as(own_rank: int, size: int) -> Callable[..., None]:
    init = c10d.init_process_group

    def init_process_group(
        backend: str | None = None, init_method: str | None = None, timeout: timedelta | None = None,
        world_size: int = -1, **options: Any,
    ) -> None:  # fmt: skip
        if world_size not in (-1, size):
            raise SimulationError(
                f"{calling_site()} makes a world of {world_size} ranks, and the mesh has {size}: take the size from "
                "the environment variable WORLD_SIZE"
            )
        init(_BACKEND, timeout=timeout, rank=own_rank, world_size=size, store=FakeStore())

    return init_process_group


def _with_fake_backend(make: Any) -> Any:
    signature = inspect.signature(make)

    def make_fake(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        given.arguments.update(backend=_BACKEND, store=FakeStore(), backend_options=None, device_id=None)
        return make(*given.args, **given.kwargs)

    return make_fake


def _pass_barrier(group: c10d.ProcessGroup | None = None, *args: Any, **options: Any) -> None:
    c10d.barrier(group)


def _refuse_processes(*args: Any, **options: Any) -> None:
    raise SimulationError(
        f"{calling_site()} starts processes for its ranks, and a simulated script is one rank, as torchrun starts it: "
        "read RANK, LOCAL_RANK and WORLD_SIZE from the environment"
    )


# -- objects
def _gather_object_from_all(object_list: list[Any], obj: Any, group: c10d.ProcessGroup | None = None) -> None:
    object_list[:] = [obj] * c10d.get_world_size(group)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **options: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _broadcast_objects(object_list: list[Any], *args: Any, **options: Any) -> None:
    if any(each is None for each in object_list):
        _refuse_object()


def _scatter_objects(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *args: Any,
    group: c10d.ProcessGroup | None = None, **options: Any,
) -> None:  # fmt: skip
    if scatter_object_input_list is None:
        _refuse_object()
        return
    scatter_object_output_list[0] = scatter_object_input_list[c10d.get_rank(group)]


def _send_objects(*args: Any, **options: Any) -> None:
    """Send nothing: nobody is there."""


def _receive_objects(*args: Any, **options: Any) -> None:
    _refuse_object()


def _refuse_object() -> None:
    raise SimulationError(
        f"{calling_site()} gets an object from a rank that is not there: give each rank the object, in the program"
    )
