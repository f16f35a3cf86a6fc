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

import msgspec
import torch
import torch.distributed as c10d

from rpcbench.base.errors import AuthenticationError, CollectiveError, RpcError
from rpcbench.distributed import groups
from rpcbench.distributed.arguments import choose_rank, complete_help
from rpcbench.distributed.comparison import run_collective
from rpcbench.distributed.groups import AnyGroup, GroupMember
from rpcbench.distributed.point_to_point import choose_peer, receive_with_layout, send_with_layout
from rpcbench.runtime import current
from rpcbench.serialization.pickler import Codec
from rpcbench.transport import run_dir
from rpcbench.wire.encoding import RECEIVED_BODY, encode_plain
from rpcbench.wire.messages import Body

_codec = Codec()
_UNSIGNED = bytes(hashlib.sha256().digest_size)
"""In place of a signature where there is no secret."""


@complete_help
def all_gather_object(object_list: list[Any], obj: Any, group: AnyGroup = None) -> None:
    """Copy the object `obj` of each rank into `object_list`, on all ranks.

    The list has one place for each rank of the group; its content is replaced. Raises AuthenticationError, too, for an
    object that is not signed with the secret that this process has.
    """
    member = groups.member_of(group)
    data, fault = _pack_object(member, "all_gather", obj)
    received: list[torch.Tensor] = []
    act = lambda: received.extend(_gather_bytes(member, data))  # noqa: E731
    fault = fault or _places_fault(object_list, member, "object_list")
    run_collective(member, "all_gather_object", [], act, fault, size=len(data))
    object_list[:] = _open_each(member, "all_gather", received)


@complete_help
def gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: AnyGroup = None,
    group_dst: int | None = None,
) -> None:  # fmt: skip
    """Copy the object `obj` of each rank into `object_gather_list` of one rank.

    Only on `dst`, by default 0, it is a list with one place for each rank of the group. Raises AuthenticationError as
    `all_gather_object`.
    """
    member = groups.member_of(group)
    to, fault = choose_rank(member.ranks, dst, group_dst, "dst", default=0)
    data, unsendable = _pack_object(member, "gather", obj)
    fault = fault or unsendable or _missing_fault(object_gather_list, member, to, "object_gather_list")
    if not fault and object_gather_list and member.world.rank != to:
        fault = f"object_gather_list is for rank {to}, not for rank {member.world.rank}"
    received: list[torch.Tensor] = []
    act = lambda: received.extend(_gather_bytes(member, data, to))  # noqa: E731
    run_collective(member, f"gather_object(dst={to})", [], act, fault, size=len(data))
    if object_gather_list:
        object_gather_list[:] = _open_each(member, "gather", received)


@complete_help
def scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, src: int | None = None,
    group: AnyGroup = None, group_src: int | None = None,
) -> None:  # fmt: skip
    """Copy to each rank its object of one rank's list, into the first place of `scatter_object_output_list`.

    Only on `src`, by default 0, `scatter_object_input_list` is read: one object for each rank of the group. Raises
    AuthenticationError as `all_gather_object`.
    """
    member = groups.member_of(group)
    source, fault = choose_rank(member.ranks, src, group_src, "src", default=0)
    given = scatter_object_input_list if member.world.rank == source else None
    parts, unsendable = _pack_objects(member, "scatter", given or [])
    fault = (
        fault or unsendable or _missing_fault(scatter_object_input_list, member, source, "scatter_object_input_list")
    )
    fault = fault or ("" if scatter_object_output_list else "scatter_object_output_list has no place")
    received: list[torch.Tensor] = []

    def scatter_bytes() -> None:
        lengths = _share_lengths(member, [len(each) for each in parts], len(member.ranks), source)
        into = _empty_bytes(member, max(lengths))
        sent = [_bytes_tensor(member, each, max(lengths)) for each in parts] if member.world.rank == source else None
        c10d.scatter(into, sent, group=member.group, group_src=member.group_rank_of(source))
        received.append(into[: lengths[member.ranks.index(member.world.rank)]])

    run_collective(member, f"scatter_object_list(src={source})", [], scatter_bytes, fault, size=sum(map(len, parts)))
    scatter_object_output_list[0] = _open_object(member, "scatter", source, received[0])


@complete_help
def broadcast_object_list(
    object_list: list[Any], src: int | None = None, group: AnyGroup = None, device: torch.device | None = None,
    group_src: int | None = None,
) -> None:  # fmt: skip
    """Copy the objects of one rank, by default 0, into the `object_list` of all others; all lists have one length.

    `device` has no effect: the bytes travel by the CPU, unless the group moves only tensors of GPUs. Raises
    AuthenticationError as `all_gather_object`.
    """
    member = groups.member_of(group)
    source, fault = choose_rank(member.ranks, src, group_src, "src", default=0)
    is_mine = member.world.rank == source
    data, unsendable = _pack_object(member, "broadcast", object_list) if is_mine else (b"", "")
    received: list[torch.Tensor] = []

    def broadcast_bytes() -> None:
        (length,) = _share_lengths(member, [len(data)], 1, source)
        moved = _bytes_tensor(member, data, length) if is_mine else _empty_bytes(member, length)
        c10d.broadcast(moved, group=member.group, group_src=member.group_rank_of(source))
        received.append(moved)

    what = f"broadcast_object_list(src={source}) of {len(object_list)}"
    run_collective(member, what, [], broadcast_bytes, fault or unsendable, size=len(data))
    if not is_mine:
        object_list[:] = _open_object(member, "broadcast", source, received[0])


@complete_help
def send_object_list(
    object_list: list[Any], dst: int | None = None, group: AnyGroup = None, device: torch.device | None = None,
    group_dst: int | None = None, use_batch: bool = False,
) -> None:  # fmt: skip
    """Send the objects of `object_list`, and return once the peer has received them, in a list of the same length.

    `device` and `use_batch` have no effect.
    """
    member = groups.member_of(group)
    to = choose_peer(member, dst, group_dst, "dst")
    data, fault = _pack_object(member, f"send to {to}", object_list)
    if fault:
        raise CollectiveError(f"{member.world.rank_label(member.world.rank)} cannot send or receive: {fault}")
    send_with_layout(member, _number_tensor(member, len(data)), to, 0, _list_name(object_list)).wait()
    send_with_layout(member, _bytes_tensor(member, data, len(data)), to, 0, "its bytes").wait()


@complete_help
def recv_object_list(
    object_list: list[Any], src: int | None = None, group: AnyGroup = None, device: torch.device | None = None,
    group_src: int | None = None, use_batch: bool = False,
) -> int:  # fmt: skip
    """Receive the objects of a list of the same length into `object_list`, and return the sender's rank.

    The sender is by default the rank that sends first. `device` and `use_batch` have no effect. Raises
    AuthenticationError as `all_gather_object`.
    """
    member = groups.member_of(group)
    source = choose_peer(member, src, group_src, "src")
    sender = receive_with_layout(member, size := _number_tensor(member, 0), source, 0, _list_name(object_list)).wait()
    data = _empty_bytes(member, int(size))
    receive_with_layout(member, data, sender, 0, "its bytes").wait()
    object_list[:] = _open_object(member, f"send to {member.world.rank}", sender, data)
    return sender


def _gather_bytes(member: GroupMember, data: bytes, to: int | None = None) -> list[torch.Tensor]:
    """Return the bytes of each rank, on all ranks or on rank `to`; elsewhere an empty list."""
    sizes = [_number_tensor(member, 0) for _ in member.ranks]
    c10d.all_gather(sizes, _number_tensor(member, len(data)), member.group)
    lengths = [int(each) for each in sizes]
    mine, into = _bytes_tensor(member, data, max(lengths)), []
    if to in (None, member.world.rank):
        into = [torch.empty_like(mine) for _ in member.ranks]
    if to is None:
        c10d.all_gather(into, mine, member.group)
    else:
        c10d.gather(mine, into, group=member.group, group_dst=member.group_rank_of(to))
    return [each[:length] for each, length in zip(into, lengths, strict=False)]


def _list_name(objects: Sequence[Any]) -> str:
    return f"a list of {len(objects)} objects"


# -- bytes
def _pack_object(member: GroupMember, deed: str, value: Any) -> tuple[bytes, str]:
    """Return the signed bytes of an object, and the reason why it cannot be sent; "" if it can."""
    try:
        body, _ = _codec.encode_value(value, label="object")
        data = encode_plain(body)
        return _sign_object(member, deed, member.world.rank, data) + data, ""
    except (RpcError, OSError, ValueError) as error:  # the object, or the file of the secret
        return b"", str(error)


def _pack_objects(member: GroupMember, deed: str, values: Sequence[Any]) -> tuple[list[bytes], str]:
    packed = [_pack_object(member, deed, value) for value in values]
    return [data for data, _ in packed], next((reason for _, reason in packed if reason), "")


def _open_object(member: GroupMember, deed: str, source: int, received: torch.Tensor) -> Any:
    """Return the object of these bytes. AuthenticationError if the rank `source` has not signed them."""
    raw = received.cpu().numpy().tobytes()
    signature, data = raw[: len(_UNSIGNED)], raw[len(_UNSIGNED) :]
    if not hmac.compare_digest(signature, _sign_object(member, deed, source, data)):
        raise AuthenticationError(
            f"an object from {member.world.rank_label(source)} is not signed with the secret of "
            f"{member.world.rank_label(member.world.rank)}: all ranks must be members of one world of RPC, or have "
            f"the same {run_dir.SECRET_VARIABLE}, or none of them"
        )
    return _codec.decode_value(Body(*msgspec.msgpack.decode(data, type=RECEIVED_BODY)))


def _open_each(member: GroupMember, deed: str, received: Sequence[torch.Tensor]) -> list[Any]:
    return [_open_object(member, deed, rank, each) for rank, each in zip(member.ranks, received, strict=True)]


def _sign_object(member: GroupMember, deed: str, source: int, data: bytes) -> bytes:
    """Return the signature of an object, valid for one operation of one rank in one group of one world."""
    agent = current.find_current()
    secret = run_dir.load_secret() if agent is None else agent.config.secret
    if not secret:
        return _UNSIGNED
    place = f"rpcbench object/{member.world.token}/{member.key}/{deed}/{source}/".encode()
    return hmac.digest(secret, place + data, "sha256")


def _number_tensor(member: GroupMember, value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=member.notes_device)


def _share_lengths(member: GroupMember, mine: Sequence[int], count: int, source: int) -> list[int]:
    """Return the `count` lengths that rank `source` has."""
    given = list(mine) if member.world.rank == source else [0] * count
    numbers = torch.tensor(given, dtype=torch.int64, device=member.notes_device)
    c10d.broadcast(numbers, group=member.group, group_src=member.group_rank_of(source))
    return numbers.tolist()


def _bytes_tensor(member: GroupMember, data: bytes, length: int) -> torch.Tensor:
    """Return bytes as a tensor of this length, filled up with zeros."""
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8).to(member.notes_device)


def _empty_bytes(member: GroupMember, length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device=member.notes_device)


# -- faults
def _places_fault(places: Sequence[Any], member: GroupMember, name: str) -> str:
    return (
        ""
        if len(places) == len(member.ranks)
        else f"{name} has {len(places)} places for a group of {len(member.ranks)}"
    )


def _missing_fault(places: Sequence[Any] | None, member: GroupMember, where: int, name: str) -> str:
    """Return the fault of a list that rank `where` must pass."""
    if member.world.rank != where:
        return ""
    return f"rank {where} passes no {name}" if places is None else _places_fault(places, member, name)
