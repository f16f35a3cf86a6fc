"""Whether a process fits a world that it asks to join, and what it is told where it does not."""

from __future__ import annotations

from collections.abc import Mapping

from rpcbench.wire.messages import Member

_MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."  # torch's words


def misfit(source: int, member: Member, asked: int | None, size: int | None, there: Mapping[int, Member]) -> str | None:
    """Why this member, who `asked` for a world of some size, is not one of a world of `size`; None where it may be."""
    if source != member.id:
        return f"worker {source} asks for id {member.id}"
    if asked != size:
        mixed = "" if size is not None and asked is not None else f"{_MIXED} "
        return f"{mixed}this world is {_kind(size)}, but {member.name} asks to join one that is {_kind(asked)}"
    if size is not None and not 0 <= member.id < size:
        return f"id {member.id} of {member.name} does not fit a world of {size}"
    if any(other.name == member.name for other in there.values()):
        return f"worker name {member.name} is not unique: another worker has it already"
    if member.id in there:
        return f"id {member.id} of {member.name} is not unique: {there[member.id].name} has it already"
    return None


def _kind(world_size: int | None) -> str:
    return "open (world_size=None)" if world_size is None else f"closed (world_size={world_size})"
