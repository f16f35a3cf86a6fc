"""The process groups of this process: the default group, its subgroups, and the handles that name them.

`new_group` returns torch's own group, which torch's functions and DistributedDataParallel accept as well. Guarantees
- A group of an ended world, of other ranks, or of another program is refused by name before anything is sent.
- A rank that ends, or Ctrl-C on one, during the creation of a group frees all ranks. The event that ends the world ends
  torch's own wait too: no thread stays behind that would change torch's groups later.
- A rank of this host that ends before it has joined is named at once, with an agent or without.
- The all-reduces of DistributedDataParallel are recorded like other collectives, by a communication hook that reduces
  gradients exactly as DistributedDataParallel does without a hook.
"""

from __future__ import annotations

import atexit
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from rpcbench.base.errors import CollectiveError, WorkerLostError
from rpcbench.distributed import stores
from rpcbench.distributed.events import CollectivePart
from rpcbench.distributed.stores import wait_until
from rpcbench.distributed.world import RETRY_HINT, RankWatch, Wait, World, meet
from rpcbench.runtime.handles import layout_of

_DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip
"""The dtypes that gloo's collectives support."""
_DEVICES = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",), "mpi": ("cpu", "cuda")}  # types of device that each supports


def torch_backend(name: str) -> str:
    """Return torch's name for a backend. Raises CollectiveError with the reason where this process cannot use it."""
    name = name.lower()
    if name == "tcp":
        raise CollectiveError("torch has dropped the backend 'tcp': use 'gloo', which has all collectives for the CPU")
    if name not in _DEVICES:
        raise CollectiveError(f"there is no backend {name!r}: use 'gloo' for CPU tensors, 'nccl' for those on GPUs")
    if name == "mpi" and not c10d.is_mpi_available():
        raise CollectiveError("this torch is built without MPI, as all that are on PyPI: use 'gloo', or build torch")
    if name == "nccl" and not (c10d.is_nccl_available() and torch.cuda.is_available()):
        raise CollectiveError("NCCL moves tensors between NVIDIA GPUs, and this process has none: use 'gloo'")
    # gloo beside NCCL: ranks compare their calls with CPU tensors before NCCL moves any tensor of a device.
    return "cpu:gloo,cuda:nccl" if name == "nccl" else name


def backend_fault(name: str, tensor: object) -> str:
    """Return the reason that the backend cannot move this tensor; empty if it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"pass a tensor, not {type(tensor).__name__}"
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return f"its {layout_name(tensor)} is not contiguous: pass tensor.contiguous()"
    if tensor.device.type not in _DEVICES[name]:
        return f"{name} takes tensors on {' or '.join(_DEVICES[name])}, not on {tensor.device}"
    if tensor.dtype not in _DTYPES:
        return f"{name} does not support {tensor.dtype}: convert the tensor first"
    return ""


def layout_name(tensor: object) -> str:
    """Return dtype and shape, as `float32[4, 2]` or `float32[N=4, C=2]`."""
    return layout_of(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__


class WatchedStore(Store):
    """A store for torch whose waits end with the world. It has only the methods that torch's groups call."""

    # torch's own store waits in C++ for the keys of other ranks: neither Ctrl-C nor the end of a rank interrupts that,
    # and it holds the store's connection meanwhile. This one waits in Python.
    def __init__(self, store: Store, world: World) -> None:
        super().__init__()
        self._store, self._world = store, world
        self.ranks: Sequence[int] = range(len(world.ranks))  # ranks for whose keys torch waits now

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # No deadline of its own: the thread that waits for this job breaks the world after its timeout.
        wait_until(lambda: self._world.reached(self._store, keys, self.ranks), math.inf)


def default_group(world: World, behind: str) -> c10d.ProcessGroup:
    """Create torch's default group, of all ranks."""
    c10d.distributed_c10d._world.group_count = 0  # a failed try was counted too, and all ranks must have one count
    store: Store = PrefixStore("torch", world.store)
    if behind == "gloo":  # not for NCCL, whose own threads use the store even while Python exits
        store = world.kept = WatchedStore(store, world)
    c10d.init_process_group(
        behind, store=store, rank=world.rank, world_size=len(world.ranks), timeout=_torch_timeout(world)
    )  # fmt: skip
    return _unless_broken(world, c10d.distributed_c10d._get_default_group())


def new_group(world: World, ranks: tuple[int, ...]) -> tuple[str, c10d.ProcessGroup]:
    """Return key and torch's group of these ranks, or torch's marker on a rank that is not in it."""
    _agree(world, ranks)
    if isinstance(world.kept, WatchedStore):
        world.kept.ranks = ranks
    return str(world.made), _unless_broken(world, c10d.new_group(list(ranks), timeout=_torch_timeout(world)))


def _unless_broken(world: World, made: c10d.ProcessGroup) -> c10d.ProcessGroup:
    """Return a group that torch has created, unless the world has ended meanwhile."""
    if world.broken:  # torch's registry of groups may already belong to the next world
        c10d.destroy_process_group(made)
        world.check()
    return made


def _torch_timeout(world: World) -> timedelta:
    """Return torch's own timeout: later than ours, since our error names the ranks that have not come."""
    return timedelta(seconds=2 * world.seconds + 10)


def _agree(world: World, ranks: tuple[int, ...]) -> None:
    """Raise on all ranks unless all request the same group."""
    world.made += 1  # counted alike on all ranks, as all of them call `new_group`
    everyone = range(len(world.ranks))
    keys = [f"new/{world.made}/{rank}" for rank in everyone]
    world.store.set(keys[world.rank], json.dumps(ranks))
    wait_until(lambda: world.reached(world.store, keys, everyone), math.inf)
    asked = [tuple(json.loads(world.store.get(key))) for key in keys]
    if len(set(asked)) > 1:
        lines = [f"  {world.named(rank)}: {listed(each)}" for rank, each in enumerate(asked)]
        raise CollectiveError("\n".join(["ranks request different groups; all must pass new_group the same:", *lines]))
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(everyone):
        raise CollectiveError(f"new_group({listed(ranks)}): pass distinct ranks from 0 to {len(keys) - 1}")


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as `[0, 1]`."""
    return f"[{', '.join(map(str, ranks))}]"


def ddp_all_reduce(group: AnyGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    """Show a DistributedDataParallel's all-reduces in panels and timelines, as its hook. Gradients stay the same.

    `model.register_comm_hook(None, rpcbench.distributed.ddp_all_reduce)` installs it.

    Args:
        group: The group of the DistributedDataParallel; None for the default group.
        bucket: The gradients to reduce, from torch.

    Returns:
        A future of the reduced flat tensor.

    Raises:
        CollectiveError: This rank is not in the group.
    """
    end, flat = member(group), bucket.buffer()
    entered = end.enter("all_reduce(AVG)", layout_name(flat), flat.nbytes)
    try:
        future = allreduce_hook(end.group, bucket)
    except BaseException:
        entered.leave(failed=True)
        raise
    return future.then(lambda done: _left(done, entered))


# torch compares the annotations of a hook with types, but `from __future__ import annotations` makes them strings.
ddp_all_reduce.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


def _left(done: Future[torch.Tensor], entered: CollectivePart) -> torch.Tensor:
    with entered:
        return done.value()


T = TypeVar("T")

SECONDS = 300.0  # that a collective may take by default
RENDEZVOUS_SECONDS = 60.0  # that ranks wait for each other in init_process_group by default
_LAST_SECONDS = 2.0  # that Python's exit may wait for our threads
_NO_WORLD = "there is no process group here: call init_process_group first, on all ranks"


class GroupMember:
    """This rank's membership in a group. `ranks` are numbers in the world; `group` is torch's."""

    def __init__(self, world: World, ranks: tuple[int, ...], group: c10d.ProcessGroup, key: str) -> None:
        self.world, self.ranks, self.group, self.key = world, ranks, group, key
        self.count = 0  # collectives so far, alike on all ranks
        self.name = "world" if key == "0" else f"group {key}"  # as panels show it
        self.names = tuple(world.ranks[rank].name for rank in ranks)
        self._scope = f"{world.token}.{key}"  # unique among all groups of all worlds
        self._ways = Counter[str]()  # transfers per direction "1>2", and ">2" from any rank

    def carry(self, job: Callable[[], T], op: str, shape: str = "", size: int = 0) -> T:
        """Run a collective on the group's thread, and return its result; the end of the world ends the wait.

        `shape` and `size`, of the tensors and in bytes, are recorded.
        """
        self.world.check()
        with self.enter(op, shape, size):
            what = f"{op} of {shape}" if shape else op
            return self.world.finish(self.world.executor(self.key).put(job), self.wait(what))

    def enter(self, op: str, shape: str, size: int) -> CollectivePart:
        """Record that this rank has entered the group's next collective."""
        self.count += 1
        return self.begin(CollectivePart(self._scope, self.count, self.name, op, self.names, shape, size))

    def begin(self, part: CollectivePart) -> CollectivePart:
        """Record a part as running, or as failed where the world has ended."""
        self.world.told.enter(part)
        if self.world.broken:  # it may have ended just before `enter`, and then no job will end the part
            part.leave(failed=True)
        return part

    def between(self, source: int, to: int, tensor: torch.Tensor) -> CollectivePart:
        """Return this rank's part of the next transfer from one rank to another."""
        return self._sent(f"{source}>{to}", "send", [source, to], tensor)

    def from_any(self, tensor: torch.Tensor) -> CollectivePart:
        """Return this rank's part of a receive from any rank, until the sender is known."""
        return self._sent(f">{self.world.rank}", "recv from any rank", [self.world.rank], tensor)

    def _sent(self, way: str, op: str, ranks: Sequence[int], tensor: torch.Tensor) -> CollectivePart:
        self._ways[way] += 1
        scope, ends = f"{self._scope}.{way}", tuple(self.world.ranks[rank].name for rank in ranks)
        return CollectivePart(scope, self._ways[way], self.name, op, ends, layout_name(tensor), tensor.nbytes)

    def wait(self, what: str) -> Wait:
        others = tuple(rank for rank in self.ranks if rank != self.world.rank)
        return Wait(what, self.key, self.count, others)


@dataclass(frozen=True, slots=True)
class Outsider:
    """The result of `new_group` on a rank that is not in the group."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A picklable handle of a group of a cluster's workers: pass it as `group=` in cells and calls on them."""

    token: str  # of the world
    key: str  # of the group in its world
    ranks: tuple[int, ...]
    workers: tuple[str, ...]  # names, in the order of `ranks`

    def here(self) -> c10d.ProcessGroup:
        """Return torch's group on this worker, for DistributedDataParallel and torch's own functions."""
        return member(self).group


class group:  # noqa: N801  (as in torch)
    """`group.WORLD` is the default group."""

    WORLD: None = None


AnyGroup = c10d.ProcessGroup | NamedGroup | Outsider | None


class _State:
    """The state of this process: one world, as torch has one default group."""

    world: World | None = None
    members: dict[str, GroupMember | Outsider] = {}  # by key of the group; "0" is the default group


def init(backend: str, method: str, world_size: int, rank: int, name: str, seconds: float | None) -> None:
    """Create the default group together with the other ranks."""
    if _State.world is not None:
        _State.world.poll_failure()  # another rank may have broken it, and then a new one may begin
    if has_world() or (_State.world is None and c10d.is_initialized()):
        raise CollectiveError("trying to initialize the default process group twice: destroy_process_group() first")
    behind = torch_backend(backend)
    place = stores.read(method, rank, world_size)
    destroy()
    # Stored before it is complete: if it breaks from now on, the next call of `init` ends it.
    world = _State.world = _world(place, name, backend.lower(), seconds)
    RankWatch.over(world)
    everyone = tuple(range(len(world.ranks)))
    wait = Wait("init_process_group", "0", 0, tuple(rank for rank in everyone if rank != world.rank))
    made = world.finish(world.executor("0").put(lambda: default_group(world, behind)), wait)
    _State.members = {"0": GroupMember(world, everyone, made, "0")}


def _world(place: stores.InitMethod, name: str, backend: str, seconds: float | None) -> World:
    """Return the world of the ranks that meet at this place."""
    try:
        met = meet(place, name, RENDEZVOUS_SECONDS if seconds is None else seconds)
        return World(met, backend, SECONDS if seconds is None else seconds)
    except c10d.DistError as error:
        raise WorkerLostError(
            "the process group was not founded: the rank that hosts its store has ended or cannot be reached "
            f"({str(error).splitlines()[0]}). {RETRY_HINT}"
        ) from error


def destroy() -> None:
    """End the default group and all others, even during a collective."""
    world, _State.world, _State.members = _State.world, None, {}
    if world is not None:
        if world.busy:
            me = world.named(world.rank)
            world.breaks(CollectiveError(f"{me} has destroyed the process group while it was in use. {RETRY_HINT}"))
        world.close(CollectiveError("this process group has been destroyed"))
        if c10d.is_initialized():
            c10d.destroy_process_group()


@atexit.register
def _join_threads_at_exit() -> None:
    """Let threads return from torch before Python exits."""
    # Python aborts the process if it stops a daemon thread inside C++ at exit.
    world = _State.world
    if world is None:
        return
    if world.broken:
        stores.wait_until(lambda: not world.busy, _LAST_SECONDS)
    if not world.busy:
        destroy()
        world.ended(_LAST_SECONDS)


def end_generation(why: str, before: tuple[str, int]) -> None:
    """End the world, if there is one, because the cluster has changed; forget its store at `before`."""
    stores.forget(*before)
    if _State.world is not None:
        _State.world.outdated = True
        _State.world.ends(
            CollectiveError(f"this process group is of an earlier generation of the cluster: {why}. {RETRY_HINT}")
        )


def has_world() -> bool:
    """Return whether there is a world that is not broken."""
    return _State.world is not None and not _State.world.broken


def member(group: AnyGroup, at_work: bool = True) -> GroupMember:
    """Return this rank's membership in a group. Raises CollectiveError with the reason where it has none."""
    # Not `at_work`: rank and size may be read in a broken world too, unless a change of the cluster made them wrong.
    world = _State.world
    if world is None:
        raise CollectiveError(_NO_WORLD)
    if at_work or world.outdated:
        world.check()
    found = _find(group)
    if isinstance(found, GroupMember):
        return found
    if found is None:
        raise CollectiveError(
            f"this process group belongs to a world that has ended, not to the current one. {RETRY_HINT}"
        )
    raise CollectiveError(f"{world.named(world.rank)} is not in the group of ranks {listed(found.ranks)}")


def _find(group: AnyGroup) -> GroupMember | Outsider | None:
    if group is None:
        return _State.members.get("0")
    if isinstance(group, Outsider):
        return group
    if isinstance(group, NamedGroup):
        # A handle can outlive its world; keys begin at 0 in each world, so the token must match as well.
        assert _State.world is not None
        return _State.members.get(group.key) if group.token == _State.world.token else None
    if isinstance(group, c10d.ProcessGroup):
        return next((m for m in _State.members.values() if isinstance(m, GroupMember) and m.group is group), None)
    raise CollectiveError(f"pass a process group that new_group has returned, not {type(group).__name__}")


def new(ranks: Sequence[int] | None) -> NamedGroup:
    """Create a group together with all other ranks, and return its handle."""
    everyone = member(None)
    world = everyone.world
    chosen = everyone.ranks if ranks is None else tuple(ranks)
    key, made = everyone.carry(lambda: new_group(world, chosen), f"new_group({listed(chosen)})")
    inside = world.rank in chosen
    _State.members[key] = GroupMember(world, tuple(sorted(chosen)), made, key) if inside else Outsider(chosen)
    return NamedGroup(world.token, key, chosen, tuple(world.ranks[rank].name for rank in chosen))


def opened(handle: NamedGroup) -> c10d.ProcessGroup | Outsider:
    """Return the result of `new_group` on this rank for a handle."""
    found = _State.members[handle.key]
    return found.group if isinstance(found, GroupMember) else found
