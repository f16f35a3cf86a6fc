"""Runs a program of this process that drives workers, as a pipeline or by RPC, and compares it with its reference.

Guarantees
- The program runs here, as any cell does; its errors are raised as they are.
- Each process that holds a part of the model keeps the values of that part, until they are compared; afterwards, also
  after an error, it has no hook and keeps nothing, and the program's objects can be used again.
"""

# Theory of operation
#
#     make_parallel()  ──►  find_parts here, then on the owners of RRefs, until no part has others elsewhere
#     a DriverCapture on each process with parts, and one here
#     parallel_step()  ──►  before an autograd context is released: all captures keep its gradients
#                      ──►  end_step everywhere; the loss is kept here
#
# The driver is a process beside the mesh of workers, at `driver_place`.

from __future__ import annotations

import inspect
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rpcbench.autograd import recorder
from rpcbench.base.errors import CompareError
from rpcbench.base.futures import Future, wait_all
from rpcbench.compare.capture import Catalog
from rpcbench.compare.driver_capture import DriverCapture
from rpcbench.compare.driver_parts import RemotePart, find_parts, open_part
from rpcbench.compare.report import CompareReport
from rpcbench.launch import spmd
from rpcbench.launch.compare_programs import (
    LABEL,
    Program,
    captures,
    check_loss,
    check_programs,
    compare_catalogs,
    fit_mesh,
    release_captures,
)
from rpcbench.runtime.agent import Agent


def compare_driver(
    agent: Agent, workers: Sequence[str], reference: Program, parallel: Program, mesh: Mapping[str, int] | None,
    steps: int, backend: str | None,
) -> CompareReport:  # fmt: skip
    """Compare a program that runs here with its reference. See `BaseCluster.compare`."""
    check_programs(reference, parallel, steps)
    if backend is not None:
        raise ValueError(
            f"backend={backend!r}: with driver=True the program runs here, without a process group of ranks"
        )
    for function, count in zip(parallel, (0, 1), strict=True):
        _check_arguments(function, count)
    whole, run = fit_mesh(mesh, workers), DrivenRun(agent, workers)
    try:
        catalogs = run.take_steps(parallel, steps)
        return compare_catalogs(agent, run.members, run.token, reference, whole, steps, catalogs)
    finally:
        release_captures(agent, run.members, run.token)


def _check_arguments(function: Callable[..., Any], count: int) -> None:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError as error:
        given = "the model alone" if count else "no argument"
        raise CompareError(
            f"with driver=True {spmd.name_of(function)} runs in this process and gets {given}: {error}. A program that "
            "runs on each rank, with a mesh, is compared without driver=True"
        ) from None


class DrivenRun:
    """A run of a program of this process, with a capture here and on each worker that holds a part of its model."""

    def __init__(self, agent: Agent, workers: Sequence[str]) -> None:
        self.token = secrets.token_hex(8)
        self.members = [*workers, agent.name]
        self._agent = agent
        self._owners: list[str] = []  # workers with a part
        self._handled = sys.exception()  # the comparison may be called where an error is handled

    def take_steps(self, program: Program, steps: int) -> list[Catalog]:
        """Make the model, take its steps, and return the values that each member has kept. No hook is left then."""
        make_model, step = program
        model = make_model()
        self._attach_captures(model)
        listeners = recorder(self._agent).on_release
        listeners.append(self._keep_context)
        try:
            for _ in range(steps):
                captures[self.token].end_step(check_loss(step, step(model)))
                self._call_owners(end_step)
        finally:
            listeners.remove(self._keep_context)
        found = dict(zip(self._owners, self._call_owners(close_capture), strict=True))
        found[self._agent.name] = close_capture(self.token)
        return [found.get(member, Catalog({}, {}, {}, {})) for member in self.members]

    def _attach_captures(self, model: Any) -> None:
        found = find_parts(model)
        parts = self._find_all(found.elsewhere)
        if not parts:
            raise CompareError(
                f"with driver=True the model is a pipeline, or has RRefs or RemoteModules, and {model!r:.80} has no "
                "part on a worker: a program that runs on each rank is compared without driver=True"
            )
        self._owners = [*parts]
        captures[self.token] = DriverCapture(found.here)
        wait_all([self._call(owner, attach_capture, own) for owner, own in parts.items()])

    def _find_all(self, parts: Sequence[RemotePart]) -> dict[str, list[RemotePart]]:
        """Return these parts and all that they refer to, by owner."""
        found: dict[str, list[RemotePart]] = {}
        ahead = {_place_of(part): part for part in parts}
        known = {*ahead}
        while ahead:
            calls = []
            for part in ahead.values():
                self._check_owner(part)
                found.setdefault(part.rref.owner_name(), []).append(part)
                calls.append(self._call(part.rref.owner_name(), find_inner_parts, part))
            inner = {_place_of(part): part for more in wait_all(calls) for part in more}
            ahead = {place: part for place, part in inner.items() if place not in known}
            known |= {*ahead}
        return found

    def _check_owner(self, part: RemotePart) -> None:
        if part.rref.owner_name() not in self.members:
            raise CompareError(
                f"{part.name or 'the model'} is on {part.rref.owner_name()}, which is not among the workers of the "
                f"comparison: {', '.join(self.members[:-1])}"
            )

    def _keep_context(self, context: int) -> None:
        """Let all owners keep the gradients of a context, before this process releases it."""
        if sys.exception() is self._handled:  # else the step has failed, and its error is the one to raise
            self._call_owners(keep_context, context)

    def _call_owners(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return wait_all([self._call(owner, function, *args) for owner in self._owners])

    def _call(self, member: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._agent.call(member, function, (self.token, *args), timeout=0, label=LABEL, own=True)


def _place_of(part: RemotePart) -> tuple[object, ...]:
    """Return the identity of a part: its owner and its names."""
    return part.rref.owner_name(), part.name, part.names


# -- on a member
def find_inner_parts(token: str, part: RemotePart) -> list[RemotePart]:
    """Return the parts on other members that a part of this one refers to."""
    return open_part(part).elsewhere


def attach_capture(token: str, parts: Sequence[RemotePart]) -> None:
    """Keep the values of these parts from now on."""
    captures[token] = DriverCapture([each for part in parts for each in open_part(part).here])


def end_step(token: str) -> None:
    """Keep the values that a step of the driver has left here."""
    captures[token].end_step()


def keep_context(token: str, context: int) -> None:
    """Keep the gradients of an autograd context, as far as they are here."""
    capture = captures[token]
    assert isinstance(capture, DriverCapture)
    capture.keep_context(context)


def close_capture(token: str) -> Catalog:
    """Remove the hooks, and return the values kept."""
    captures[token].close()
    return captures[token].catalog
