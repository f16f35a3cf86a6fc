"""What the device maps of a world must keep to: the same verdict on every member, for all know all maps.

The beginning of each verdict is worded as programs written for torch match it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from rpcbench.wire.messages import Device, Devices, Mapped, Member

Map = dict[torch.device, torch.device]


def stated(used: Iterable[str], maps: Mapping[str, Mapping[str, str]]) -> Devices:
    """What this process tells the others of its devices."""
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else ""
    count = torch.get_device_module(kind).device_count() if kind else 0
    lines = tuple(Mapped(to, here, there) for to, pairs in maps.items() for here, there in pairs.items())
    return Devices(kind, count, tuple(map(Device, used)), lines)


def map_between(source: Member, target: Member) -> Map:
    """Where tensors on the devices of `source` go when it calls `target`."""
    return _maps(source).get(target.name, {})


def problem(members: Sequence[Member], closed: bool) -> str | None:
    """The first breach, None if there is none. In an open world those whom a map names may come later."""
    known = {member.name: member for member in members}
    return next((breach for member in members for breach in _breaches(member, known, closed)), None)


def _breaches(source: Member, known: dict[str, Member], closed: bool) -> Iterator[str]:
    used, node, maps = _used(source), f"Node {source.name}", _maps(source)
    if len(set(used)) != len(used):
        yield f"{node} has duplicated devices: {_list(used)}"
    if missing := _missing(used, source):
        yield f"{node} has devices with invalid indices: {_list(missing)}; {_equipment(source)}"
    if closed and not maps.keys() <= known.keys():
        unknown = sorted(maps.keys() - known.keys())
        yield f"{node} has invalid target node names in its device maps: {unknown} of {sorted(known)}"
    for name, pairs in maps.items():
        for breach in _breaches_of(pairs, source, known.get(name)):
            yield f"{node} has {breach[0]} in its device map for {name}: {breach[1]}"


def _breaches_of(pairs: Map, source: Member, target: Member | None) -> Iterator[tuple[str, str]]:
    if len(set(pairs.values())) != len(pairs):
        yield "duplicated target devices", _list(pairs.values())
    yield from _unfit("source", pairs.keys(), source)
    if target is not None:
        yield from _unfit("target", pairs.values(), target)


def _unfit(role: str, devices: Iterable[torch.device], member: Member) -> Iterator[tuple[str, str]]:
    used = _used(member)
    if used:
        if strange := [device for device in devices if device not in used and device.type != "cpu"]:
            yield f"unexpected {role} devices", f"{_list(strange)}; {member.name} uses {_list(used)}"
    elif missing := _missing(devices, member):
        yield f"{role} devices with invalid indices", f"{_list(missing)}; {_equipment(member)}"


def _missing(devices: Iterable[torch.device], member: Member) -> list[torch.device]:
    """Those that the member does not have."""
    kind, count = member.devices.kind, member.devices.number
    return [d for d in devices if d.type != "cpu" and not (d.type == kind and (d.index or 0) < count)]


def _maps(member: Member) -> dict[str, Map]:
    found: dict[str, Map] = {}
    for to, here, there in member.devices.maps:
        found.setdefault(to, {})[torch.device(here)] = torch.device(there)
    return found


def _used(member: Member) -> list[torch.device]:
    return [torch.device(device.name) for device in member.devices.used]


def _list(devices: Iterable[torch.device]) -> str:
    return ", ".join(map(str, devices))


def _equipment(member: Member) -> str:
    kind, count, *_ = member.devices
    return f"{member.name} has {count} of {kind}" if kind else f"{member.name} has the CPU alone"
