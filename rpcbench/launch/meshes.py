"""A torch `DeviceMesh` on each worker of a cluster, and the notebook's picture of it: `cluster.mesh(dp=2, tp=2)`.

Guarantees
- Names, sizes and workers are checked before any worker is asked: a mesh that does not fit changes nothing.
- Ranks are those of the cluster's process group, in row-major order: the last dimension has neighbouring workers.
- The process group that exists is used, whoever made it; where there is none, the workers make the one that
  `rpcbench.distributed.init_process_group` makes by default.
- No rank waits longer than that group's timeout, and the loss of a worker ends the waits of the others.
"""

from __future__ import annotations

import html
import itertools
import keyword
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rpcbench.base.errors import CollectiveError, WorkerLostError, count_noun, suggest_nearest
from rpcbench.base.futures import wait_all
from rpcbench.launch.ranks import GROUP
from rpcbench.runtime.agent import Agent

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SECONDS = 600.0  # for a call that makes groups: later than the timeout of a group, whose error names the missing rank
_EXAMPLE = "cluster.mesh(dp=2, tp=2)"


@dataclass(frozen=True, slots=True, repr=False)
class ClusterMesh:
    """A mesh of workers, seen from their notebook: each has it as a `DeviceMesh` in its variable `name`.

    Args:
        name: The variable of the workers' cells.
        dimensions: Names of the dimensions, outermost first.
        shape: The number of workers along each dimension.
        workers: Names, in row-major order of their coordinates.
        device: The type of device whose tensors its groups move: "cpu" or "cuda".
    """

    name: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    workers: tuple[str, ...]
    device: str

    @property
    def coordinates(self) -> dict[str, dict[str, int]]:
        """The coordinates of each worker: `{"worker1": {"dp": 0, "tp": 0}, …}`."""
        places = itertools.product(*map(range, self.shape))
        return {
            worker: dict(zip(self.dimensions, place, strict=True))
            for worker, place in zip(self.workers, places, strict=True)
        }

    def at(self, **coordinates: int) -> list[str]:
        """Return the workers with these coordinates: `mesh.at(dp=1)` are those of a row. ValueError if there is no
        such dimension, or no such coordinate along it."""
        sizes = dict(zip(self.dimensions, self.shape, strict=True))
        for name, place in coordinates.items():
            if name not in sizes:
                raise ValueError(f"this mesh has no dimension {name!r}: {suggest_nearest(name, sizes)}")
            if place not in range(sizes[name]):
                raise ValueError(f"{name}={place} is outside the mesh: {name} counts from 0 to {sizes[name] - 1}")
        wanted = coordinates.items()
        return [worker for worker, place in self.coordinates.items() if wanted <= place.items()]

    def _labelled_rows(self) -> list[tuple[str, Sequence[str]]]:
        """Return the workers in rows along the last dimension, each with its place along the others."""
        *outer, width = self.shape
        places = itertools.product(*map(range, outer))
        labels = [_format_sizes(dict(zip(self.dimensions, place, strict=False)), " ") for place in places]
        return [(label, self.workers[i * width : (i + 1) * width]) for i, label in enumerate(labels)]

    def _head_labels(self) -> list[str]:
        return [f"{self.dimensions[-1]}={place}" for place in range(self.shape[-1])]

    @property
    def _title(self) -> str:
        return f"{self.name}({_format_sizes(dict(zip(self.dimensions, self.shape, strict=True)))}) on {self.device}"

    def __repr__(self) -> str:
        rows = [("", self._head_labels()), *self._labelled_rows()]
        margin, cell = max(len(label) for label, _ in rows), max(len(each) for _, row in rows for each in row)
        lines = (f"{label:{margin}}  {'  '.join(f'{each:{cell}}' for each in row)}".rstrip() for label, row in rows)
        return "\n".join([self._title, *lines])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{html.escape(each)}</th>" for each in ["", *self._head_labels()])
        rows = "".join(
            f"<tr><th>{html.escape(label)}</th>{''.join(f'<td>{html.escape(each)}</td>' for each in row)}</tr>"
            for label, row in self._labelled_rows()
        )
        caption = f'<caption style="text-align: left; white-space: nowrap">{html.escape(self._title)}</caption>'
        return f"<table>{caption}<tr>{heads}</tr>{rows}</table>"


def make_mesh(
    agent: Agent, workers: Sequence[str], lost: Sequence[str], name: str, sizes: Mapping[str, int]
) -> ClusterMesh:
    """Make a mesh of all `workers`. See `BaseCluster.mesh`; `lost` are those that ended and were not started again."""
    check_mesh(name, sizes, workers, lost)
    _ensure_group(agent, workers)
    names, shape = tuple(sizes), tuple(sizes.values())
    calls = [
        agent.call(
            each, make_local_mesh, (name, names, shape), timeout=_SECONDS, label="the setup of the mesh", own=True
        )
        for each in workers
    ]
    made: list[Placement] = wait_all(calls)
    order = sorted(zip(made, workers, strict=True))
    return ClusterMesh(name, names, shape, tuple(worker for _, worker in order), made[0].device)


def check_mesh(name: str, sizes: Mapping[str, int], workers: Sequence[str], lost: Sequence[str]) -> None:
    """Raise ValueError, TypeError or WorkerLostError if no mesh of these sizes can be made of these workers."""
    for word in (name, *sizes):
        if not isinstance(word, str) or not word.isidentifier() or keyword.iskeyword(word):
            raise ValueError(f"{word!r} cannot be a name in a mesh: pass a Python identifier, as in {_EXAMPLE}")
    if not sizes:
        raise ValueError(f"a mesh has at least one dimension, with a name and a size: {_EXAMPLE}")
    for dimension, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{dimension}={size!r}: the size of a dimension is a whole number, as in {_EXAMPLE}")
        if size < 1:
            raise ValueError(f"{dimension}={size}: each dimension of a mesh has at least one worker, as in {_EXAMPLE}")
    if lost:
        raise WorkerLostError(
            f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost, and a mesh is of all workers: start them "
            "again with cluster.restart(name), then call mesh again"
        )
    if (product := math.prod(sizes.values())) != len(workers):
        raise ValueError(
            f"{_format_sizes(sizes)} has {count_noun(product, 'place')}, and this cluster has "
            f"{count_noun(len(workers), 'worker')}: "
            f"cluster.mesh({_format_sizes(fit_sizes(sizes, len(workers)))}) fits"
        )


def fit_sizes(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Return sizes with the product `count`: as near as that allows to those given, from the last dimension on."""
    found: dict[str, int] = {}
    first, *others = sizes
    for dimension in reversed(others):
        most = min(sizes[dimension], count)
        found[dimension] = next(size for size in range(most, 0, -1) if count % size == 0)
        count //= found[dimension]
    return {first: count, **dict(reversed(found.items()))}


def _format_sizes(sizes: Mapping[str, int], between: str = ", ") -> str:
    return between.join(f"{dimension}={size}" for dimension, size in sizes.items())


def _ensure_group(agent: Agent, workers: Sequence[str]) -> None:
    """Make the process group of all workers, unless they have one. CollectiveError if only some have one."""
    from rpcbench.distributed import groups  # here: it loads torch.distributed

    ranks: list[int] = wait_all(
        [agent.call(name, groups.default_group_size, label=GROUP, own=True) for name in workers]
    )
    if not any(ranks):
        wait_all([agent.call(name, create_group, timeout=_SECONDS, label=GROUP, own=True) for name in workers])
    elif set(ranks) != {len(workers)}:
        sizes = zip(workers, ranks, strict=True)
        there = ", ".join(f"{name} {f'in one of {size}' if size else 'in none'}" for name, size in sizes)
        raise CollectiveError(
            f"a mesh needs one process group of all {count_noun(len(workers), 'worker')}, and they are in different "
            f"ones ({there}): run rpcbench.distributed.destroy_process_group() on those, then call mesh again"
        )


class Placement(NamedTuple):
    """The place of one worker in a mesh, as the worker reports it."""

    coordinate: tuple[int, ...]
    device: str


def create_group() -> None:
    """Create the default process group together with all other workers. Called on each worker."""
    from rpcbench.distributed import init_process_group

    init_process_group()


def make_local_mesh(name: str, dimensions: tuple[str, ...], shape: tuple[int, ...]) -> Placement:
    """Make the mesh together with all other workers, as the variable `name` of this worker's cells."""
    from rpcbench.distributed import groups

    make = partial(make_device_mesh, dimensions, shape)
    what = f"mesh({_format_sizes(dict(zip(dimensions, shape, strict=True)))})"
    mesh = groups.member_of(None).run_job(make, what) if groups.has_world() else make()
    vars(sys.modules["__main__"])[name] = mesh
    return Placement(tuple(mesh.get_coordinate() or ()), mesh.device_type)


def make_device_mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh of all ranks of the default process group, on the devices of its backend."""
    import torch.distributed as c10d
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda" if "nccl" in c10d.get_backend_config() else "cpu", sizes, mesh_dim_names=names)
