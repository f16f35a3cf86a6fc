"""Which groups this process is in: the default one, those made of it, and the handles by which they are named.

`new_group` gives torch's own group, which torch's functions and DistributedDataParallel take as well. Guarantees
- A group of a world that is over, of other ranks, or of somebody else is refused by name before anything is sent.
- A rank that ends, or Ctrl-C on one, while groups are made frees all ranks.

torch waits in C++ for what other ranks put into the store, deaf to Ctrl-C and to the end of a rank, and holds the
store's connection meanwhile. gloo gets the store from here, which waits in Python.
- What ends the world ends torch's own wait, too: no thread stays behind that would change torch's groups later.
- A rank of this host that has ended before it has joined is named at once, with an agent or without.
- DistributedDataParallel's all-reduces are told of as other collectives are, by a hook of torch's own for what it does
  with gradients, which does what it does without one.
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
from rpcbench.distributed.events import Part
from rpcbench.distributed.stores import polled
from rpcbench.distributed.world import AGAIN, RankWatch, Wait, World, meet
from rpcbench.runtime.handles import layout_of

_NUMBERS = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip
"""What gloo's collectives can move."""
_DEVICES = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",), "mpi": ("cpu", "cuda")}


def torch_backend(name: str) -> str:
    """What torch is asked for. CollectiveError where this process cannot have it, with the reason.

    NCCL comes with gloo beside it, on which ranks agree before they move tensors of devices.
    """
    name = name.lower()
    if name == "tcp":
        raise CollectiveError("torch has dropped the backend 'tcp': use 'gloo', which does all of it on CPU tensors")
    if name not in _DEVICES:
        raise CollectiveError(f"there is no backend {name!r}: use 'gloo' for CPU tensors, 'nccl' for those on GPUs")
    if name == "mpi" and not c10d.is_mpi_available():
        raise CollectiveError("this torch is built without MPI, as all that are on PyPI: use 'gloo', or build torch")
    if name == "nccl" and not (c10d.is_nccl_available() and torch.cuda.is_available()):
        raise CollectiveError("NCCL moves tensors between NVIDIA GPUs, and this process has none: use 'gloo'")
    return "cpu:gloo,cuda:nccl" if name == "nccl" else name


def backend_fault(name: str, tensor: object) -> str:
    """Why the backend cannot take this for a tensor; empty where it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"a tensor is wanted, not {type(tensor).__name__}"
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return f"its {layout_name(tensor)} is not contiguous: pass tensor.contiguous()"
    if tensor.device.type not in _DEVICES[name]:
        return f"{name} takes tensors on {' or '.join(_DEVICES[name])}, not on {tensor.device}"
    if tensor.dtype not in _NUMBERS:
        return f"{name} moves no {tensor.dtype}: convert it first"
    return ""


def layout_name(tensor: object) -> str:
    """As `float32[4, 2]`, or `float32[N=4, C=2]`."""
    return layout_of(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__


class WatchedStore(Store):
    """A store for torch, whose waits end with the world. Whatever is not said here, torch's groups do not ask for."""

    def __init__(self, store: Store, world: World) -> None:
        super().__init__()
        self._store, self._world = store, world
        self.ranks: Sequence[int] = range(len(world.ranks))  # those that torch waits for now

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
        polled(lambda: self._world.reached(self._store, keys, self.ranks), math.inf)


def default_group(world: World, behind: str) -> c10d.ProcessGroup:
    """torch's default group, of all ranks."""
    c10d.distributed_c10d._world.group_count = 0  # a founding that failed has counted, and ranks must count alike
    store: Store = PrefixStore("torch", world.store)
    if behind == "gloo":  # NCCL asks the store from threads of its own, also while Python ends
        store = world.kept = WatchedStore(store, world)
    c10d.init_process_group(
        behind, store=store, rank=world.rank, world_size=len(world.ranks), timeout=_patience(world)
    )  # fmt: skip
    return _in_time(world, c10d.distributed_c10d._get_default_group())


def new_group(world: World, ranks: tuple[int, ...]) -> tuple[str, c10d.ProcessGroup]:
    """The key and torch's group of these ranks; of a rank that is not in it, torch's word for that."""
    _agree(world, ranks)
    if isinstance(world.kept, WatchedStore):
        world.kept.ranks = ranks
    return str(world.made), _in_time(world, c10d.new_group(list(ranks), timeout=_patience(world)))


def _in_time(world: World, made: c10d.ProcessGroup) -> c10d.ProcessGroup:
    """What torch has made, unless the world has ended meanwhile: torch's groups may be those of the next one then."""
    if world.broken:
        c10d.destroy_process_group(made)
        world.check()
    return made


def _patience(world: World) -> timedelta:
    """What torch gets: our own deadline comes first, as it tells who has not come."""
    return timedelta(seconds=2 * world.seconds + 10)


def _agree(world: World, ranks: tuple[int, ...]) -> None:
    """All ranks ask for the same group, or all raise."""
    world.made += 1
    everyone = range(len(world.ranks))
    keys = [f"new/{world.made}/{rank}" for rank in everyone]
    world.store.set(keys[world.rank], json.dumps(ranks))
    polled(lambda: world.reached(world.store, keys, everyone), math.inf)
    asked = [tuple(json.loads(world.store.get(key))) for key in keys]
    if len(set(asked)) > 1:
        lines = [f"  {world.named(rank)}: {listed(each)}" for rank, each in enumerate(asked)]
        raise CollectiveError("\n".join(["ranks make different groups; all must call new_group alike:", *lines]))
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(everyone):
        raise CollectiveError(f"new_group({listed(ranks)}): name different ranks, from 0 to {len(keys) - 1}")


def listed(ranks: Sequence[int]) -> str:
    """As `[0, 1]`."""
    return f"[{', '.join(map(str, ranks))}]"


def ddp_all_reduce(group: AnyGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    """`model.register_comm_hook(None, rpcbench.distributed.ddp_all_reduce)`: panels and timelines show its all-reduces.

    group: that of the DistributedDataParallel, None for the default one. Gradients are what they are without it.
    CollectiveError where this rank is not in the group.
    """
    end, flat = member(group), bucket.buffer()
    entered = end.enter("all_reduce(AVG)", layout_name(flat), flat.nbytes)
    try:
        future = allreduce_hook(end.group, bucket)
    except BaseException:
        entered.leave(failed=True)
        raise
    return future.then(lambda done: _left(done, entered))


# torch compares the annotations of a hook with the types themselves: here they would be strings.
ddp_all_reduce.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


def _left(done: Future[torch.Tensor], entered: Part) -> torch.Tensor:
    with entered:
        return done.value()


T = TypeVar("T")

SECONDS = 300.0
MEETING_SECONDS = 60.0
_LAST_SECONDS = 2.0
_NO_WORLD = "there is no process group here: call init_process_group first, on all ranks"


class Member:
    """This rank's end of a group. `ranks` are numbers in the world; `group` is torch's."""

    def __init__(self, world: World, ranks: tuple[int, ...], group: c10d.ProcessGroup, key: str) -> None:
        self.world, self.ranks, self.group, self.key = world, ranks, group, key
        self.count = 0
        self.name = "world" if key == "0" else f"group {key}"
        self.names = tuple(world.ranks[rank].name for rank in ranks)
        self._scope = f"{world.token}.{key}"
        self._ways = Counter[str]()  # what went between two ranks, or comes from any

    def carry(self, job: Callable[[], T], op: str, shape: str = "", size: int = 0) -> T:
        """Do something together, on the group's lane, with tensors of this shape and so many bytes.

        What ends the world ends the wait.
        """
        self.world.check()
        with self.enter(op, shape, size):
            what = f"{op} of {shape}" if shape else op
            return self.world.finish(self.world.lane(self.key).put(job), self.wait(what))

    def enter(self, op: str, shape: str, size: int) -> Part:
        """The next thing that all ranks of the group do is under way here."""
        self.count += 1
        return self.begin(Part(self._scope, self.count, self.name, op, self.names, shape, size))

    def begin(self, part: Part) -> Part:
        """It is under way here, as long as the world is."""
        self.world.told.enter(part)
        if self.world.broken:  # it may have ended just before, and its lanes take no more jobs
            part.leave(failed=True)
        return part

    def between(self, source: int, to: int, tensor: torch.Tensor) -> Part:
        """This rank's part of the next thing that one rank sends to another."""
        return self._sent(f"{source}>{to}", "send", [source, to], tensor)

    def from_any(self, tensor: torch.Tensor) -> Part:
        """As `between`, as long as nobody knows which rank will send."""
        return self._sent(f">{self.world.rank}", "recv from any rank", [self.world.rank], tensor)

    def _sent(self, way: str, op: str, ranks: Sequence[int], tensor: torch.Tensor) -> Part:
        self._ways[way] += 1
        scope, ends = f"{self._scope}.{way}", tuple(self.world.ranks[rank].name for rank in ranks)
        return Part(scope, self._ways[way], self.name, op, ends, layout_name(tensor), tensor.nbytes)

    def wait(self, what: str) -> Wait:
        others = tuple(rank for rank in self.ranks if rank != self.world.rank)
        return Wait(what, self.key, self.count, others)


@dataclass(frozen=True, slots=True)
class Outsider:
    """What `new_group` gives to a rank that is not in the group."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A group of a cluster's workers, as a handle that may travel: pass it as `group=` in cells and calls on them."""

    token: str
    key: str
    ranks: tuple[int, ...]
    workers: tuple[str, ...]

    def here(self) -> c10d.ProcessGroup:
        """torch's group on this worker, for DistributedDataParallel and torch's own functions."""
        return member(self).group


class group:  # noqa: N801  (as in torch)
    """`group.WORLD` is the default group."""

    WORLD: None = None


AnyGroup = c10d.ProcessGroup | NamedGroup | Outsider | None


class _State:
    """All of this process; torch has but one default group as well."""

    world: World | None = None
    members: dict[str, Member | Outsider] = {}


def init(backend: str, method: str, world_size: int, rank: int, name: str, seconds: float | None) -> None:
    """Found the default group with the others."""
    if _State.world is not None:
        _State.world.hear()
    if has_world() or (_State.world is None and c10d.is_initialized()):
        raise CollectiveError("trying to initialize the default process group twice: destroy_process_group() first")
    behind = torch_backend(backend)
    place = stores.read(method, rank, world_size)
    destroy()
    world = _State.world = _world(place, name, backend.lower(), seconds)  # one that breaks now is ended by the next
    RankWatch.over(world)
    everyone = tuple(range(len(world.ranks)))
    wait = Wait("init_process_group", "0", 0, tuple(rank for rank in everyone if rank != world.rank))
    made = world.finish(world.lane("0").put(lambda: default_group(world, behind)), wait)
    _State.members = {"0": Member(world, everyone, made, "0")}


def _world(place: stores.Place, name: str, backend: str, seconds: float | None) -> World:
    """The world of those who meet there."""
    try:
        met = meet(place, name, MEETING_SECONDS if seconds is None else seconds)
        return World(met, backend, SECONDS if seconds is None else seconds)
    except c10d.DistError as error:
        raise WorkerLostError(
            "the process group was not founded: the rank that keeps its store is gone, or out of reach "
            f"({str(error).splitlines()[0]}). {AGAIN}"
        ) from error


def destroy() -> None:
    """End the default group and all others, whatever they are at."""
    world, _State.world, _State.members = _State.world, None, {}
    if world is not None:
        if world.busy:
            me = world.named(world.rank)
            world.breaks(CollectiveError(f"{me} has destroyed the process group while at work in it. {AGAIN}"))
        world.close(CollectiveError("this process group has been destroyed"))
        if c10d.is_initialized():
            c10d.destroy_process_group()


@atexit.register
def _come_out() -> None:
    """Python aborts where it stops a thread inside of C++ at its end: those whose wait has ended come out first."""
    world = _State.world
    if world is None:
        return
    if world.broken:
        stores.polled(lambda: not world.busy, _LAST_SECONDS)
    if not world.busy:
        destroy()
        world.ended(_LAST_SECONDS)


def retire(why: str, before: tuple[str, int]) -> None:
    """The world, if there is one, is over as the cluster has changed; nobody meets at `before` again."""
    stores.forget(*before)
    if _State.world is not None:
        _State.world.outdated = True
        _State.world.ends(
            CollectiveError(f"this process group is of an earlier generation of the cluster: {why}. {AGAIN}")
        )


def has_world() -> bool:
    """Whether there is one, and nothing has broken it."""
    return _State.world is not None and not _State.world.broken


def member(group: AnyGroup, at_work: bool = True) -> Member:
    """This rank's end of a group. CollectiveError where it has none in it, and says why.

    at_work: not in a world that is broken; who only asks for its rank may, unless the cluster has changed.
    """
    world = _State.world
    if world is None:
        raise CollectiveError(_NO_WORLD)
    if at_work or world.outdated:
        world.check()
    found = _find(group)
    if isinstance(found, Member):
        return found
    if found is None:
        raise CollectiveError(
            f"this process group is of a world that has ended, not of the one that is here now. {AGAIN}"
        )
    raise CollectiveError(f"{world.named(world.rank)} is not in the group of ranks {listed(found.ranks)}")


def _find(group: AnyGroup) -> Member | Outsider | None:
    if group is None:
        return _State.members.get("0")
    if isinstance(group, Outsider):
        return group
    if isinstance(group, NamedGroup):
        assert _State.world is not None
        return _State.members.get(group.key) if group.token == _State.world.token else None
    if isinstance(group, c10d.ProcessGroup):
        return next((m for m in _State.members.values() if isinstance(m, Member) and m.group is group), None)
    raise CollectiveError(f"a process group is wanted, as new_group gives it, not {type(group).__name__}")


def new(ranks: Sequence[int] | None) -> NamedGroup:
    """Make a group with all other ranks; its handle. Its ends are `member` of that."""
    everyone = member(None)
    world = everyone.world
    chosen = everyone.ranks if ranks is None else tuple(ranks)
    key, made = everyone.carry(lambda: new_group(world, chosen), f"new_group({listed(chosen)})")
    inside = world.rank in chosen
    _State.members[key] = Member(world, tuple(sorted(chosen)), made, key) if inside else Outsider(chosen)
    return NamedGroup(world.token, key, chosen, tuple(world.ranks[rank].name for rank in chosen))


def opened(handle: NamedGroup) -> c10d.ProcessGroup | Outsider:
    """What `new_group` returns for a handle, on this rank."""
    found = _State.members[handle.key]
    return found.group if isinstance(found, Member) else found
