"""Which way tensors on devices go to each member: by this member's map for calls, by the caller's for answers.

A gradient takes the way of the tensor it belongs to, backwards.
"""

from __future__ import annotations

from collections.abc import Callable

from rpcbench.agent import placement
from rpcbench.protocol.node import Node
from rpcbench.serialization.tensor_types import CPU_ONLY, Route
from rpcbench.wire.messages import Member

Ask = Callable[[Callable[[Node], dict[int, Member]]], dict[int, Member]]


class Routes:
    """`ask` looks into the machine; routes are kept until `forget`, so that a call needs no lock to find its own."""

    def __init__(self, me: int, ask: Ask) -> None:
        self._me = me
        self._ask = ask
        self._kept: dict[tuple[int, bool], Route] = {}

    def to(self, worker: int, answer: bool) -> Route:
        """The way of calls to a member, or of answers to its calls."""
        return self._kept.get((worker, answer)) or self._made(worker, answer)

    def forget(self, worker: int) -> None:
        """The member has gone; another may come in its place."""
        for answer in (False, True):
            self._kept.pop((worker, answer), None)

    def problem(self, closed: bool) -> str | None:
        """What is wrong with the device maps of this world; None if nothing is."""
        return placement.problem(list(self._members().values()), closed)

    def _made(self, worker: int, answer: bool) -> Route:
        members = self._members()
        me, other = members.get(self._me), members.get(worker)
        if me is None or other is None:
            return CPU_ONLY  # the call fails anyway
        if answer:
            there = {target: source for source, target in placement.map_between(other, me).items()}
            route = Route(there, _refusal("Response", other.name))
        else:
            route = Route(placement.map_between(me, other), _refusal("Request", other.name))
        self._kept[worker, answer] = route
        return route

    def _members(self) -> dict[int, Member]:
        return self._ask(lambda node: dict(node.members.members))


def _refusal(direction: str, name: str) -> str:
    return (
        "TensorPipe RPC backend only supports CPU tensors by default: move it to the CPU, or have the caller map its "
        "device by `set_device_map` on `TensorPipeRpcBackendOptions` (device_maps= of a Cluster). "
        f"{direction} device mapping is not available for destination {name}."
    )
