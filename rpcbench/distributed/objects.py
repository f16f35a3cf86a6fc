"""Collectives and transfers of Python objects: the bytes of an object travel as a tensor of unknown length.

Guarantees
- An object travels as in a call: functions and classes of the notebook by value, tensors beside the pickle. Its class
  is the one that calls have brought here. One that cannot be sent raises a CollectiveError with the reason on all
  ranks, and the group stays usable.
- Nothing is unpickled before its sender is known, where this process has a secret: that of its world of RPC, as each
  worker of a cluster, or that of RPCBENCH_SECRET_FILE. Then each object is signed with it, for its group and operation;
  one that is not raises AuthenticationError.
- Without a secret objects are unsigned, as torch's are: run such a program only in a network that you trust.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import msgpack
import torch
import torch.distributed as c10d

from rpcbench.base.errors import AuthenticationError, CollectiveError, RpcError
from rpcbench.distributed import groups
from rpcbench.distributed.arguments import chosen_rank
from rpcbench.distributed.comparison import begun
from rpcbench.distributed.groups import AnyGroup, GroupMember
from rpcbench.distributed.point_to_point import receive_as, send_as
from rpcbench.runtime import current
from rpcbench.serialization.pickler import Codec
from rpcbench.transport import run_dir
from rpcbench.wire.messages import Body

_codec = Codec()
_UNSIGNED = bytes(hashlib.sha256().digest_size)
"""In place of a signature where there is no secret."""


def all_gather_object(object_list: list[Any], obj: Any, group: AnyGroup = None) -> None:
    """Copy the object of each rank into `object_list`, on all ranks.

    Args:
        object_list: A list with one place for each rank of the group; its content is replaced.
        obj: The object of this rank.
        group: By default all ranks.

    Raises:
        CollectiveError: The calls of the ranks differ, or one is invalid; the group stays usable. Or, as the following
            errors, the world is broken.
        RpcTimeoutError: A rank has not come in time.
        WorkerLostError: A rank has ended.
        AuthenticationError: An object is not signed with the secret that this process has.
    """
    end = groups.member(group)
    data, wrong = _packed(end, "all_gather", obj)
    received: list[torch.Tensor] = []

    def act() -> None:
        sizes = [torch.zeros(1, dtype=torch.int64, device=end.notes_on) for _ in end.ranks]
        c10d.all_gather(sizes, _number(end, len(data)), end.group)
        lengths = [int(each) for each in sizes]
        into = [torch.empty(max(lengths), dtype=torch.uint8, device=end.notes_on) for _ in end.ranks]
        c10d.all_gather(into, _tensor(end, data, max(lengths)), end.group)
        received.extend(each[:length] for each, length in zip(into, lengths, strict=True))

    wrong = wrong or _places_fault(object_list, end, "object_list")
    begun(end, "all_gather_object", [], act, wrong, size=len(data)).wait()
    object_list[:] = [_opened(end, "all_gather", rank, each) for rank, each in zip(end.ranks, received, strict=True)]


def gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: AnyGroup = None,
    group_dst: int | None = None,
) -> None:  # fmt: skip
    """Copy the object of each rank into `object_gather_list` of one rank.

    Args:
        obj: The object of this rank.
        object_gather_list: On `dst` only: a list with one place for each rank of the group.
        dst: Destination, as a rank of the world; by default 0.
        group: By default all ranks.
        group_dst: Destination, as a position in the group, in place of `dst`.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError, AuthenticationError: As of `all_gather_object`.
    """
    end = groups.member(group)
    to, wrong = chosen_rank(end.ranks, dst, group_dst, "dst", default=0)
    data, unsendable = _packed(end, "gather", obj)
    wrong = wrong or unsendable or _one_sided(object_gather_list, end, to, "object_gather_list")
    if not wrong and object_gather_list and end.world.rank != to:
        wrong = f"object_gather_list is for rank {to}, not for rank {end.world.rank}"
    received: list[torch.Tensor] = []

    def act() -> None:
        sizes = [torch.zeros(1, dtype=torch.int64, device=end.notes_on) for _ in end.ranks]
        c10d.all_gather(sizes, _number(end, len(data)), end.group)
        lengths = [int(each) for each in sizes]
        into = None
        if end.world.rank == to:
            into = [torch.empty(max(lengths), dtype=torch.uint8, device=end.notes_on) for _ in end.ranks]
        c10d.gather(_tensor(end, data, max(lengths)), into, group=end.group, group_dst=end.place_of(to))
        received.extend(each[:length] for each, length in zip(into or (), lengths, strict=False))

    begun(end, f"gather_object(dst={to})", [], act, wrong, size=len(data)).wait()
    if object_gather_list:
        found = [_opened(end, "gather", rank, each) for rank, each in zip(end.ranks, received, strict=True)]
        object_gather_list[:] = found


def scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, src: int | None = None,
    group: AnyGroup = None, group_src: int | None = None,
) -> None:  # fmt: skip
    """Copy to each rank its object of one rank's list.

    Args:
        scatter_object_output_list: A list with at least one place; the first gets the object.
        scatter_object_input_list: One object for each rank of the group; read on `src` only.
        src: Source, as a rank of the world; by default 0.
        group: By default all ranks.
        group_src: Source, as a position in the group, in place of `src`.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError, AuthenticationError: As of `all_gather_object`.
    """
    end = groups.member(group)
    source, wrong = chosen_rank(end.ranks, src, group_src, "src", default=0)
    given = scatter_object_input_list if end.world.rank == source else None
    parts, unsendable = _packed_each(end, "scatter", given or [])
    wrong = wrong or unsendable or _one_sided(scatter_object_input_list, end, source, "scatter_object_input_list")
    wrong = wrong or ("" if scatter_object_output_list else "scatter_object_output_list has no place")
    received: list[torch.Tensor] = []

    def act() -> None:
        lengths = _lengths(end, [len(each) for each in parts], len(end.ranks), source)
        into = torch.empty(max(lengths), dtype=torch.uint8, device=end.notes_on)
        sent = [_tensor(end, each, max(lengths)) for each in parts] if end.world.rank == source else None
        c10d.scatter(into, sent, group=end.group, group_src=end.place_of(source))
        received.append(into[: lengths[end.ranks.index(end.world.rank)]])

    begun(end, f"scatter_object_list(src={source})", [], act, wrong, size=sum(map(len, parts))).wait()
    scatter_object_output_list[0] = _opened(end, "scatter", source, received[0])


def broadcast_object_list(
    object_list: list[Any], src: int | None = None, group: AnyGroup = None, device: torch.device | None = None,
    group_src: int | None = None,
) -> None:  # fmt: skip
    """Copy the objects of one rank into the lists of all others.

    Args:
        object_list: A list of the same length on all ranks.
        src: Source, as a rank of the world; by default 0.
        group: By default all ranks.
        device: Without effect: the bytes travel by the CPU, unless the group moves only tensors of GPUs.
        group_src: Source, as a position in the group, in place of `src`.

    Raises:
        CollectiveError, RpcTimeoutError, WorkerLostError, AuthenticationError: As of `all_gather_object`.
    """
    end = groups.member(group)
    source, wrong = chosen_rank(end.ranks, src, group_src, "src", default=0)
    mine = end.world.rank == source
    data, unsendable = _packed(end, "broadcast", object_list) if mine else (b"", "")
    received: list[torch.Tensor] = []

    def act() -> None:
        (length,) = _lengths(end, [len(data)], 1, source)
        moved = _tensor(end, data, length) if mine else torch.empty(length, dtype=torch.uint8, device=end.notes_on)
        c10d.broadcast(moved, group=end.group, group_src=end.place_of(source))
        received.append(moved)

    what = f"broadcast_object_list(src={source}) of {len(object_list)}"
    begun(end, what, [], act, wrong or unsendable, size=len(data)).wait()
    if not mine:
        object_list[:] = _opened(end, "broadcast", source, received[0])


def send_object_list(
    object_list: list[Any], dst: int | None = None, group: AnyGroup = None, device: torch.device | None = None,
    group_dst: int | None = None, use_batch: bool = False,
) -> None:  # fmt: skip
    """Send a list of objects, and return once the peer has received them.

    Args:
        object_list: The objects.
        dst: Destination, as a rank of the world.
        group: By default all ranks.
        device, use_batch: Without effect.
        group_dst: Destination, as a position in the group, in place of `dst`.

    Raises:
        CollectiveError: The receiver receives a tensor, or a list of another length, or this call is invalid.
        RpcTimeoutError, WorkerLostError: As of `all_gather_object`.
    """
    end = groups.member(group)
    to, wrong = chosen_rank(end.ranks, dst, group_dst, "dst")
    wrong = wrong or (f"rank {to} is this rank" if to == end.world.rank else "")
    data, unsendable = _packed(end, f"send to {to}", object_list)
    if wrong or unsendable:
        raise CollectiveError(f"{end.world.named(end.world.rank)} cannot send or receive: {wrong or unsendable}")
    send_as(end, _number(end, len(data)), to, 0, _list_of(object_list)).wait()
    send_as(end, _tensor(end, data, len(data)), to, 0, "its bytes").wait()


def recv_object_list(
    object_list: list[Any], src: int | None = None, group: AnyGroup = None, device: torch.device | None = None,
    group_src: int | None = None, use_batch: bool = False,
) -> int:  # fmt: skip
    """Receive a list of objects.

    Args:
        object_list: A list of the sender's length; its content is replaced.
        src: Source, as a rank of the world; None, and no `group_src`: the rank that sends first.
        group: By default all ranks.
        device, use_batch: Without effect.
        group_src: Source, as a position in the group, in place of `src`.

    Returns:
        The sender's rank.

    Raises:
        CollectiveError: The sender sends a tensor, or a list of another length, or this call is invalid.
        RpcTimeoutError, WorkerLostError, AuthenticationError: As of `all_gather_object`.
    """
    end = groups.member(group)
    source, wrong = -1, ""
    if src is not None or group_src is not None:
        source, wrong = chosen_rank(end.ranks, src, group_src, "src")
        wrong = wrong or (f"rank {source} is this rank" if source == end.world.rank else "")
    if wrong:
        raise CollectiveError(f"{end.world.named(end.world.rank)} cannot send or receive: {wrong}")
    sender = receive_as(end, size := _number(end, 0), source, 0, _list_of(object_list)).wait()
    data = torch.empty(int(size), dtype=torch.uint8, device=end.notes_on)
    receive_as(end, data, sender, 0, "its bytes").wait()
    object_list[:] = _opened(end, f"send to {end.world.rank}", sender, data)
    return sender


def _list_of(objects: Sequence[Any]) -> str:
    return f"a list of {len(objects)} objects"


# -- bytes
def _packed(end: GroupMember, deed: str, value: Any) -> tuple[bytes, str]:
    """Return the signed bytes of an object, and the reason why it cannot be sent; "" if it can."""
    try:
        body, _ = _codec.encode(value, label="object")
        data = msgpack.packb((body.payload, body.tensors, [bytes(buffer) for buffer in body.buffers]))
        return _signature(end, deed, end.world.rank, data) + data, ""
    except (RpcError, OSError, ValueError) as error:  # the object, or the file of the secret
        return b"", str(error)


def _packed_each(end: GroupMember, deed: str, values: Sequence[Any]) -> tuple[list[bytes], str]:
    packed = [_packed(end, deed, value) for value in values]
    return [data for data, _ in packed], next((reason for _, reason in packed if reason), "")


def _opened(end: GroupMember, deed: str, source: int, received: torch.Tensor) -> Any:
    """Return the object of these bytes. AuthenticationError if the rank `source` has not signed them."""
    raw = received.cpu().numpy().tobytes()
    signature, data = raw[: len(_UNSIGNED)], raw[len(_UNSIGNED) :]
    if not hmac.compare_digest(signature, _signature(end, deed, source, data)):
        raise AuthenticationError(
            f"an object from {end.world.named(source)} is not signed with the secret of "
            f"{end.world.named(end.world.rank)}: all ranks must be members of one world of RPC, or have the same "
            f"{run_dir.SECRET_VARIABLE}, or none of them"
        )
    payload, table, buffers = msgpack.unpackb(data)
    return _codec.decode(Body(payload, table, [bytearray(buffer) for buffer in buffers]))


def _signature(end: GroupMember, deed: str, source: int, data: bytes) -> bytes:
    """Return the signature of an object, valid for one operation of one rank in one group of one world."""
    agent = current.find()
    secret = run_dir.load_secret() if agent is None else agent.config.secret
    if not secret:
        return _UNSIGNED
    place = f"rpcbench object/{end.world.token}/{end.key}/{deed}/{source}/".encode()
    return hmac.digest(secret, place + data, "sha256")


def _number(end: GroupMember, value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=end.notes_on)


def _lengths(end: GroupMember, mine: Sequence[int], count: int, source: int) -> list[int]:
    """Return the `count` lengths that rank `source` has."""
    given = list(mine) if end.world.rank == source else [0] * count
    numbers = torch.tensor(given, dtype=torch.int64, device=end.notes_on)
    c10d.broadcast(numbers, group=end.group, group_src=end.place_of(source))
    return numbers.tolist()


def _tensor(end: GroupMember, data: bytes, length: int) -> torch.Tensor:
    """Return bytes as a tensor of this length, filled up with zeros."""
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8).to(end.notes_on)


# -- faults
def _places_fault(places: Sequence[Any], end: GroupMember, name: str) -> str:
    return "" if len(places) == len(end.ranks) else f"{name} has {len(places)} places for a group of {len(end.ranks)}"


def _one_sided(places: Sequence[Any] | None, end: GroupMember, where: int, name: str) -> str:
    """Return the fault of a list that rank `where` must pass."""
    if end.world.rank != where:
        return ""
    return f"rank {where} passes no {name}" if places is None else _places_fault(places, end, name)
