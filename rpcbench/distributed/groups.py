"""The process groups of this process: the default group, its subgroups, and the handles that name them.

`new_group` returns torch's own group, which torch's functions and DistributedDataParallel accept as well. Guarantees
- A group of an ended world, of other ranks, or of another program is refused by name before anything is sent.
- A rank that ends, or Ctrl-C on one, during the creation of a group frees all ranks. The event that ends the world ends
  torch's own wait too: no thread stays behind that would change torch's groups later.
- A rank of this host that ends before it has joined is named at once, with an agent or without.
- A world that torch's own functions have founded is this process's world, until they or ours end it.
- The all-reduces of DistributedDataParallel are recorded like other collectives, by a communication hook that reduces
  gradients exactly as DistributedDataParallel does without a hook.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import Backend, GradBucket, PrefixStore, Store
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from rpcbench.base.errors import CollectiveError
from rpcbench.distributed import backends, stores
from rpcbench.distributed.events import OWN_CALLS, CollectivePart
from rpcbench.distributed.executor import Pending
from rpcbench.distributed.memory_layouts import BOTH, DEVICES, layout_name
from rpcbench.distributed.stores import wait_until
from rpcbench.distributed.torch_worlds import HandMadeWorld, TorchWorld, backend_of
from rpcbench.distributed.world import RETRY_HINT, RankWatch, Wait, World, convert_store_errors, meet_all_ranks


def torch_backend(name: str) -> str:
    """Return torch's name for a backend. Raises CollectiveError with the reason where this process cannot use it."""
    name = name.lower()
    if name == "tcp":
        raise CollectiveError("torch has dropped the backend 'tcp': use 'gloo', which has all collectives for the CPU")
    if name not in DEVICES:
        raise CollectiveError(f"there is no backend {name!r}: use 'gloo' for CPU tensors, 'nccl' for those on GPUs")
    if name == "mpi" and not c10d.is_mpi_available():
        raise CollectiveError("this torch is built without MPI, as all that are on PyPI: use 'gloo', or build torch")
    if name in ("nccl", BOTH) and not (c10d.is_nccl_available() and torch.cuda.is_available()):
        raise CollectiveError("NCCL moves tensors between NVIDIA GPUs, and this process has none: use 'gloo'")
    # gloo beside NCCL: it moves CPU tensors, with which ranks also compare their calls before NCCL moves any tensor.
    return BOTH if name == "nccl" else name


class WatchedStore(Store):
    """A store for torch whose waits end with the world. It has only the methods that torch's groups call."""

    # torch's own store waits in C++ for the keys of other ranks: neither Ctrl-C nor the end of a rank interrupts that,
    # and it holds the store's connection meanwhile. This one waits in Python.
    def __init__(self, store: Store, world: World) -> None:
        super().__init__()
        self._store = store
        self._world = weakref.proxy(world)  # the world holds this store: with it its connection ends, and the listener
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
        wait_until(lambda: self._world.has_all_keys(self._store, keys, self.ranks), math.inf)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a group shall be made, beside its ranks."""

    backend: str = ""  # empty: that of the world
    seconds: float | None = None  # for each wait; None: those of the world
    keeps_order: bool = False  # the ranks of the group are in the order given, not in that of the world
    local: bool = False  # only the ranks of the group call `new_group`
    for_torch: Mapping[str, Any] = field(default_factory=dict)  # arguments that are passed on

    def __str__(self) -> str:
        option_texts = [
            f", {name} {value:g} s" if name == "timeout" else f", {name} {value}"
            for name, value in (("backend", self.backend), ("timeout", self.seconds))
            if value
        ]
        return "".join([*option_texts, ", in this order" * self.keeps_order])


def create_default_group(world: World, behind: str, **for_torch: Any) -> c10d.ProcessGroup:
    """Create torch's default group, of all ranks. `for_torch`: arguments that are passed on."""
    c10d.distributed_c10d._world.group_count = 0  # a failed try was counted too, and all ranks must have one count
    store: Store = PrefixStore("torch", world.store)
    if behind == "gloo":  # not for NCCL, whose own threads use the store even while Python exits
        store = world.kept = WatchedStore(store, world)
    c10d.init_process_group(
        behind, store=store, rank=world.rank, world_size=len(world.ranks), timeout=_torch_timeout(world.seconds),
        **for_torch,
    )  # fmt: skip
    return _unless_broken(world, c10d.distributed_c10d._get_default_group())


def new_group(world: World, ranks: tuple[int, ...], how: GroupOptions) -> tuple[str, c10d.ProcessGroup]:
    """Return key and torch's group of these ranks, or torch's marker on a rank that is not in it."""
    key = _agree_on_group(world, ranks, how)
    watched, everyone = world.kept, range(len(world.ranks))
    if isinstance(watched, WatchedStore):
        watched.ranks = ranks
    torchs = c10d.distributed_c10d._world
    count = torchs.group_count
    if how.local:
        # torch names such a group by the number of all groups of the rank, which differs between the ranks: they would
        # wait for each other under different names. This count becomes the name.
        torchs.group_count = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())
    try:
        made = c10d.new_group(
            list(ranks), _torch_timeout(how.seconds or world.seconds),
            torch_backend(how.backend) if how.backend else None, sort_ranks=not how.keeps_order, **how.for_torch,
        )  # fmt: skip
    finally:  # torch makes groups by itself as well, for a device mesh
        if how.local:
            torchs.group_count = count
        if isinstance(watched, WatchedStore):
            watched.ranks = everyone
    return key, _unless_broken(world, made)


def _unless_broken(world: World, made: c10d.ProcessGroup) -> c10d.ProcessGroup:
    """Return a group that torch has created, unless the world has ended meanwhile."""
    if world.is_broken:  # torch's registry of groups may already belong to the next world
        c10d.destroy_process_group(made)
        world.raise_if_broken()
    return made


def _torch_timeout(seconds: float) -> timedelta:
    """Return torch's own timeout: later than ours, since our error names the ranks that have not come."""
    return timedelta(seconds=2 * seconds + 10)


def _agree_on_group(world: World, ranks: tuple[int, ...], how: GroupOptions) -> str:
    """Return the group's key. Raises on all ranks that call unless all of them request the same valid group."""
    if how.local:
        world.made_locally[ranks] += 1
        key, callers = f"local {format_ranks(ranks)} {world.made_locally[ranks]}", sorted(set(ranks))
    else:
        world.made += 1  # counted alike on all ranks, as all of them call `new_group`
        key, callers = str(world.made), list(range(len(world.ranks)))
    wrong = _group_fault(world, ranks, how)
    keys = {rank: f"new/{key}/{rank}" for rank in callers}
    request = f"{format_ranks(ranks)}{how}"
    world.store.set(keys[world.rank], f"{request}: {wrong}" if wrong else request)
    if not (how.local and wrong):  # else the ranks to wait for are not known
        wait_until(lambda: world.has_all_keys(world.store, [*keys.values()], callers), math.inf)
        requests = {rank: world.store.get(key).decode() for rank, key in keys.items()}
        if len(set(requests.values())) > 1:
            lines = [f"  {world.rank_label(rank)}: {each}" for rank, each in requests.items()]
            title = "ranks request different groups; all must pass new_group the same:"
            raise CollectiveError("\n".join([title, *lines]))
    if wrong:
        raise CollectiveError(f"new_group({request}): {wrong}")
    return key


def _group_fault(world: World, ranks: tuple[int, ...], how: GroupOptions) -> str:
    """Return the fault of a request for a group; "" if it has none."""
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(len(world.ranks))):
        return f"pass distinct ranks from 0 to {len(world.ranks) - 1}"
    try:
        return torch_backend(how.backend) and "" if how.backend else ""  # that of the world is known to work
    except CollectiveError as error:
        return str(error)


def format_ranks(ranks: Sequence[int]) -> str:
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
    member, flat = member_of(group), bucket.buffer()
    entered = member.enter_collective("all_reduce(AVG)", layout_name(flat), flat.nbytes)
    try:
        with OWN_CALLS.mark_group(member.group):
            future = allreduce_hook(member.group, bucket)
    except BaseException:
        entered.record_end(failed=True)
        raise
    return future.then(lambda done: _end_part(done, entered))


# torch compares the annotations of a hook with types, but `from __future__ import annotations` makes them strings.
ddp_all_reduce.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


def _end_part(done: Future[torch.Tensor], entered: CollectivePart) -> torch.Tensor:
    with entered:
        return done.value()


T = TypeVar("T")
_TAKING_OVER = threading.Lock()  # held while the world and its members change together

DESTROYED = "this process group has been destroyed"
SECONDS = 300.0  # that a collective may take by default
RENDEZVOUS_SECONDS = 60.0  # that ranks wait for each other in init_process_group by default
_LAST_SECONDS = 2.0  # that Python's exit may wait for our threads
_NO_WORLD = "there is no process group here: call init_process_group first, on all ranks"


class GroupMember:
    """This rank's membership in a group. `ranks` are numbers in the world, in the group's order."""

    def __init__(
        self, world: World, ranks: tuple[int, ...], group: Any, key: str, backend: str | None = None,
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        self.world, self.ranks, self.key = world, ranks, key
        self._group: Callable[[], Any] = (lambda: group) if world.keeps_groups else weakref.ref(group)
        self.backend = backend or world.backend
        self.seconds = seconds  # for each wait; None: those of the world
        self.count = 0  # collectives so far, alike on all ranks
        self.name = "world" if key == "0" else f"group {key}"  # as panels show it
        self.names = tuple(world.ranks[rank].name for rank in ranks)
        self._scope = f"{world.token}.{key}"  # unique among all groups of all worlds
        self._transfer_counts = Counter[str]()  # transfers per direction "1>2", and ">2" from any rank

    @property
    def group(self) -> Any:
        """torch's group. Raises CollectiveError if it has been freed."""
        if (group := self._group()) is None:
            raise CollectiveError(DESTROYED)
        return group

    def is_member_of(self, group: object) -> bool:
        """Return whether this is the membership in a group of torch."""
        return group is not None and self._group() is group

    def group_rank_of(self, rank: int) -> int:
        """Return the position in the group of a rank of the world: torch takes it in a group made by hand, too."""
        return self.ranks.index(rank)

    def run_job(self, job: Callable[[], T], op: str, shape: str = "", size: int = 0) -> T:
        """Run a collective on the group's thread, and return its result; the end of the world ends the wait.

        `shape` and `size`, of the tensors and in bytes, are recorded.
        """
        return self.world.wait_for_result(*self.begin_job(job, op, shape, size))

    def begin_job(
        self, job: Callable[[], T], op: str, shape: str = "", size: int = 0, seconds: float | None = None
    ) -> tuple[Pending[T], Wait]:
        """Do as `run_job`, but return the job, and the wait for it."""
        self.world.raise_if_broken()
        group, entered = self.group, self.enter_collective(op, shape, size)  # the job keeps the group alive

        def run_recorded() -> T:
            with entered, OWN_CALLS if isinstance(group, Backend) else OWN_CALLS.mark_group(group):
                return job()

        wait = self.make_wait(f"{op} of {shape}" if shape else op, seconds)
        return self.world.executor_for(self.key).submit_job(run_recorded), wait

    @functools.cached_property
    def notes_device(self) -> torch.device:
        """The device of the small tensors by which ranks compare their calls: the CPU, if the group moves those."""
        if isinstance(self.group, Backend):  # made by hand
            return torch.device("cuda" if self.backend == "nccl" else "cpu")
        devices = [each.type for each in self.group._device_types]
        return torch.device("cpu" if "cpu" in devices else devices[0])

    def enter_collective(self, op: str, shape: str, size: int) -> CollectivePart:
        """Record that this rank has entered the group's next collective."""
        self.count += 1
        return self.begin_part(CollectivePart(self._scope, self.count, self.name, op, self.names, shape, size))

    def begin_part(self, part: CollectivePart) -> CollectivePart:
        """Record a part as running, or as failed where the world has ended."""
        self.world.collective_events.record_entry(part)
        if self.world.is_broken:  # it may have ended just before `enter_collective`, and then no job will end the part
            part.record_end(failed=True)
        return part

    def make_transfer_part(self, source: int, to: int, tensor: torch.Tensor, tag: int = 0) -> CollectivePart:
        """Return this rank's part of the next transfer from one rank to another."""
        return self._next_transfer(f"{source}>{to}", "send", [source, to], tensor, tag)

    def make_receive_any_part(self, tensor: torch.Tensor, tag: int = 0) -> CollectivePart:
        """Return this rank's part of a receive from any rank, until the sender is known."""
        return self._next_transfer(f">{self.world.rank}", "recv from any rank", [self.world.rank], tensor, tag)

    def _next_transfer(self, pair: str, op: str, ends: Sequence[int], tensor: torch.Tensor, tag: int) -> CollectivePart:
        key = f"{pair} tag {tag}" if tag else pair  # numbered apart: transfers keep their order only within a tag
        self._transfer_counts[key] += 1
        scope, number = f"{self._scope}.{key}", self._transfer_counts[key]
        names = tuple(self.world.ranks[rank].name for rank in ends)
        return CollectivePart(scope, number, self.name, op, names, layout_name(tensor), tensor.nbytes)

    def make_wait(self, what: str, seconds: float | None = None) -> Wait:
        others = tuple(rank for rank in self.ranks if rank != self.world.rank)
        return Wait(what, self.key, self.count, others, self.seconds if seconds is None else seconds)


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
        group: c10d.ProcessGroup = member_of(self).group
        return group


AnyGroup = c10d.ProcessGroup | Backend | NamedGroup | Outsider | None


class _State:
    """The state of this process: one world, as torch has one default group."""

    world: World | None = None
    members: dict[str, GroupMember | Outsider] = {}  # by key of the group; "0" is the default group
    made_by_hand: weakref.WeakKeyDictionary[object, GroupMember] = weakref.WeakKeyDictionary()  # by torch's group


def init_default_group(
    backend: str | None, method: str, world_size: int, rank: int, name: str, seconds: float | None,
    store: Store | None = None, for_torch: Mapping[str, Any] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Create the default group together with the other ranks."""
    if (world := _present_world()) is not None:
        world.poll_failure()  # another rank may have broken it, and then a new one may begin
    if has_world():
        raise CollectiveError("trying to initialize the default process group twice: destroy_process_group() first")
    if backend is not None:
        torch_backend(backend)  # a wrong one is an error before any rank is waited for
    if store is None:
        place = stores.parse_init_method(method, rank, world_size)
    else:
        place = stores.init_method_of_store(store, rank, world_size)
    destroy_all_groups()
    # Stored before it is complete: if it breaks from now on, the next call of `init_default_group` ends it.
    world = _State.world = _meet_world(place, name, backend, seconds)
    RankWatch.watch_world(world)
    everyone = tuple(range(len(world.ranks)))
    wait = Wait("init_process_group", "0", 0, tuple(rank for rank in everyone if rank != world.rank))
    behind = torch_backend(world.backend)
    job = world.executor_for("0").submit_job(lambda: create_default_group(world, behind, **for_torch))
    made = world.wait_for_result(job, wait)
    _State.members = {"0": GroupMember(world, everyone, made, "0")}


def _meet_world(place: stores.InitMethod, name: str, backend: str | None, seconds: float | None) -> World:
    """Return the world of the ranks that meet at this place."""
    with convert_store_errors(place):
        patience = RENDEZVOUS_SECONDS if seconds is None else seconds
        met = meet_all_ranks(place, name, patience, backends.backend_offer(backend))
        offers = {f"rank {rank} ({who.name})": who.offer for rank, who in enumerate(met.ranks)}
        return World(met, backends.choose_backend(offers), SECONDS if seconds is None else seconds)


def destroy_all_groups() -> None:
    """End the default group and all others, even during a collective."""
    world, _State.world, _State.members = _State.world, None, {}
    OWN_CALLS.numbers.clear()  # the next world counts anew
    if world is None and c10d.is_initialized():  # torch has made it, by itself
        c10d.destroy_process_group()
    if world is not None:
        if world.is_busy:
            text = f"{world.rank_label(world.rank)} has destroyed the process group while it was in use. {RETRY_HINT}"
            world.break_on_all_ranks(CollectiveError(text))
        world.close(CollectiveError(DESTROYED))
        if c10d.is_initialized():
            c10d.destroy_process_group()


@atexit.register
def _join_threads_at_exit() -> None:
    """Let threads return from torch before Python exits."""
    # Python aborts the process if it stops a daemon thread inside C++ at exit.
    by_hand = [each.world for each in list(_State.made_by_hand.values())]
    for world in filter(None, [*by_hand, _State.world]):
        if world.is_busy:  # a receive that nobody answers, for example
            world.break_on_this_rank(CollectiveError(DESTROYED))
        if not stores.wait_until(lambda world=world: not world.is_busy, _LAST_SECONDS):  # type: ignore[misc]
            continue
        if world is _State.world and not isinstance(world, TorchWorld):
            destroy_all_groups()
        else:
            world.close(CollectiveError(DESTROYED))  # torch, or the program, ends what it has founded
        world.join_threads(_LAST_SECONDS)


def _present_world() -> World | None:
    """Return this process's world, after taking over one that torch's own functions have founded since, or ended."""
    world, ours = _State.world, _State.members.get("0")
    there = c10d.distributed_c10d._get_default_group() if c10d.is_initialized() else None
    if ours.is_member_of(there) if isinstance(ours, GroupMember) else world is None and there is None:
        return world
    if world is not None and (there is None if world.is_broken else ours is None):
        return world  # the reason is still to be told; or it is being founded
    found = None if there is None else TorchWorld(there)
    with _TAKING_OVER:
        if _State.world is world:  # else another thread has been here
            if world is not None:
                world.close(CollectiveError(DESTROYED))
            _State.members = {}
            _State.world = found
            if found is not None:
                _State.members = {"0": GroupMember(found, tuple(range(len(found.ranks))), there, "0")}
    if found is not None and found is _State.world:
        RankWatch.watch_world(found)
    return _State.world


def mark_world_outdated() -> None:
    """Mark the world, if there is one, as one of a cluster that has changed; `end_generation` follows."""
    if _State.world is not None:
        _State.world.outdated = True


def end_generation(why: str, before: tuple[str, int]) -> None:
    """End the world, if there is one, because the cluster has changed; forget its store at `before`."""
    stores.forget_store(*before)
    mark_world_outdated()
    if _State.world is not None:
        _State.world.break_on_this_rank(
            CollectiveError(f"this process group is of an earlier generation of the cluster: {why}. {RETRY_HINT}")
        )


def world_of_group(group: c10d.ProcessGroup | None) -> World | None:
    """Return the world whose default group this is; None for one that torch has made by itself."""
    found = _State.members.get("0")
    return found.world if isinstance(found, GroupMember) and found.is_member_of(group) else None


def has_world() -> bool:
    """Return whether there is a world that is not broken."""
    return (world := _present_world()) is not None and not world.is_broken


def default_group_size() -> int:
    """Return the number of ranks in the default group; 0 where there is none, or one that is broken."""
    there = c10d.group.WORLD
    if there is not None and world_of_group(there) is None and (_State.world is None or "0" in _State.members):
        return int(there.size())  # torch's own. Not taken over: its store may have ceased to answer
    return 0 if (world := _present_world()) is None or world.is_broken else len(world.ranks)


def member_of(group: AnyGroup, at_work: bool = True) -> GroupMember:
    """Return this rank's membership in a group. Raises CollectiveError with the reason where it has none."""
    # Not `at_work`: rank and size may be read in a broken world too, unless a change of the cluster made them wrong.
    if (by_hand := _made_by_hand(group)) is not None:
        return by_hand
    world = _present_world()
    if world is None:
        raise CollectiveError(_NO_WORLD)
    if at_work or world.outdated:
        world.raise_if_broken()
    found = _find_member(group)
    if isinstance(found, GroupMember):
        return found
    if found is None:
        raise CollectiveError(
            "this process group has been destroyed, or belongs to a world that has ended, not to the current one. "
            + RETRY_HINT
        )
    which = f"the group of ranks {format_ranks(found.ranks)}" if found.ranks else "this group"
    raise CollectiveError(f"{world.rank_label(world.rank)} is not in {which}")


def _find_member(group: object) -> GroupMember | Outsider | None:
    if group is None:
        return _State.members.get("0")
    if isinstance(group, Outsider):
        return group
    if not isinstance(group, NamedGroup | c10d.ProcessGroup) and group == c10d.GroupMember.NON_GROUP_MEMBER:
        return Outsider(())  # torch does not tell its ranks
    if isinstance(group, NamedGroup):
        # A handle can outlive its world; keys begin at 0 in each world, so the token must match as well.
        assert _State.world is not None
        return _State.members.get(group.key) if group.token == _State.world.token else None
    if isinstance(group, c10d.ProcessGroup):
        found = (m for m in _State.members.values() if isinstance(m, GroupMember) and m.is_member_of(group))
        return next(found, None) or _adopt_group(group)
    raise CollectiveError(f"pass a process group that new_group has returned, not {type(group).__name__}")


def _made_by_hand(group: object) -> GroupMember | None:
    """Return this rank's membership in a group that the program has made from a store, and torch has not registered."""
    if not isinstance(group, c10d.ProcessGroup | Backend) or group in c10d.distributed_c10d._world.pg_map:
        return None
    if isinstance(group, c10d.ProcessGroup) and group.group_name:
        return None  # torch has named it, and ended it
    if (known := _State.made_by_hand.get(group)) is None:
        world = HandMadeWorld(group)
        ranks = tuple(range(len(world.ranks)))
        known = _State.made_by_hand.setdefault(group, GroupMember(world, ranks, group, "made by hand"))
    return known


def _adopt_group(group: c10d.ProcessGroup) -> GroupMember | None:
    """Return this rank's membership in a group that torch has made in this world, for a device mesh for example."""
    world = _State.world
    if world is None or group not in c10d.distributed_c10d._world.pg_map:
        return None
    key = f"torch {group.group_name}"  # the same on all ranks of the group
    made = GroupMember(world, tuple(c10d.get_process_group_ranks(group)), group, key, backend_of(group))
    if group.group_desc not in ("", "undefined"):
        made.name = f"group {group.group_desc}"
    _State.members[key] = made
    return made


def create_group(ranks: Sequence[int] | None, how: GroupOptions = GroupOptions()) -> NamedGroup:
    """Create a group together with the other ranks, and return its handle."""
    everyone = member_of(None)
    world = everyone.world
    chosen = everyone.ranks if ranks is None else tuple(ranks)
    inside, what = world.rank in chosen, f"new_group({format_ranks(chosen)})"
    if not how.local:
        key, made = everyone.run_job(lambda: new_group(world, chosen, how), what)
    elif inside:  # not a collective of the world, which all of its ranks count
        others = tuple(rank for rank in chosen if rank != world.rank)
        job = world.executor_for("0").submit_job(lambda: new_group(world, chosen, how))
        wait = Wait(what, f"new {format_ranks(chosen)}", 0, others, how.seconds)
        key, made = world.wait_for_result(job, wait)
    else:
        key = f"local {format_ranks(chosen)}"
    ordered = chosen if how.keeps_order else tuple(sorted(chosen))
    _State.members[key] = (
        GroupMember(world, ordered, made, key, how.backend, how.seconds) if inside else Outsider(chosen)
    )
    return NamedGroup(world.token, key, chosen, tuple(world.ranks[rank].name for rank in chosen))


def end_group(group: AnyGroup) -> None:
    """End one group of this rank; the default group with all others. Raises CollectiveError if one of its jobs runs."""
    member = member_of(group, at_work=False)
    if isinstance(member.world, HandMadeWorld):
        member.world.close(CollectiveError(DESTROYED))
        member.group.shutdown()
        return
    if member.key == "0":
        destroy_all_groups()
        return
    if member.world.is_group_busy(member.key):
        me = member.world.rank_label(member.world.rank)
        raise CollectiveError(f"{me} cannot end {member.name} during a collective: wait for it first")
    del _State.members[member.key]
    c10d.destroy_process_group(member.group)


def group_of_handle(handle: NamedGroup) -> c10d.ProcessGroup | Outsider:
    """Return the result of `new_group` on this rank for a handle."""
    found = _State.members[handle.key]
    return found.group if isinstance(found, GroupMember) else found
