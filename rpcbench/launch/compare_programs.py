"""Runs a training step here and on the ranks of a mesh, and compares the two: `cluster.compare`.

Guarantees
- The ranks run as in `cluster.spmd`: a process group made for them, errors and Ctrl-C as there.
- Values stay on the worker that made them until they are compared, in a file; after the comparison, also a failed one,
  no worker keeps anything.
- The reference runs in this process: once as it is, and `allowances.RUNS` times moved by round-off.
"""

from __future__ import annotations

import inspect
import itertools
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rpcbench.base.errors import CompareError, WorkerLostError
from rpcbench.base.futures import wait_all
from rpcbench.compare.allowances import RUNS, MovementMeter, RoundOff, coarsest_types
from rpcbench.compare.capture import INITIAL, INPUT, LOSS, Capture, Catalog, Kept, Key, Perturb, StoreValue
from rpcbench.compare.compare_runs import Runs
from rpcbench.compare.layouts import Coordinate, norm_of
from rpcbench.compare.report import CompareReport, make_report
from rpcbench.compare.report_rows import Comparisons
from rpcbench.compare.verdicts import Mesh, driver_place
from rpcbench.launch import meshes, spmd
from rpcbench.runtime.agent import Agent

Program = tuple[Callable[..., nn.Module], Callable[..., Any]]
"""Makes a model, and runs a training step with it, which returns the loss."""
_RANDOM = 0.1  # an input that moves by this share of itself is drawn anew each time
LABEL = "the comparison"  # of calls, in errors


def compare_programs(
    agent: Agent, workers: Sequence[str], reference: Program, parallel: Program, mesh: Mapping[str, int] | None,
    steps: int, backend: str | None,
) -> CompareReport:  # fmt: skip
    """Compare two programs; `workers` are the ranks. See `BaseCluster.compare`."""
    check_programs(reference, parallel, steps)
    whole, token = fit_mesh(mesh, workers), secrets.token_hex(8)
    try:
        program = partial(run_rank, token, parallel, whole, steps)
        label = spmd.name_of(parallel[1])
        catalogs: list[Catalog] = spmd.run_program(
            agent, workers, backend, program, label=label, deed="cluster.compare"
        )
        _check_losses(parallel[1], steps, catalogs)
        return compare_catalogs(agent, workers, token, reference, whole, steps, catalogs)
    finally:
        release_captures(agent, workers, token)


def compare_captures(
    agent: Agent, workers: Sequence[str], name: str, reference: Program, mesh: Mapping[str, int] | None
) -> CompareReport:
    """Compare what cells of the ranks have captured with a program. See `BaseCluster.compare_captures`."""
    whole = fit_mesh(mesh, workers)
    calls = [agent.call(worker, read_catalog, (name,), label=LABEL, own=True) for worker in workers]
    catalogs: list[Catalog] = wait_all(calls)
    steps = {max((key.turn for key in catalog.values), default=0) + 1 for catalog in catalogs}
    if len(steps) > 1:
        raise CompareError(f"the workers have captured different numbers of steps: {', '.join(map(str, steps))}")
    (count,) = steps
    check_programs(reference, reference, count)
    return compare_catalogs(agent, workers, name, reference, whole, count, catalogs)


def fit_mesh(mesh: Mapping[str, int] | None, workers: Sequence[str]) -> Mesh:
    """Return the mesh of these workers. ValueError or TypeError if they do not fit."""
    if not isinstance(mesh, Mapping | None):
        raise TypeError(f"mesh gives each dimension a name and a size, as mesh={{'dp': 2, 'tp': 2}}, and not {mesh!r}")
    sizes = dict(mesh) if mesh is not None else {"rank": len(workers)}
    meshes.check_mesh("mesh", sizes, workers, [])
    return Mesh(tuple(sizes), tuple(sizes.values()))


def compare_catalogs(
    agent: Agent, workers: Sequence[str], token: str, reference: Program, mesh: Mesh, steps: int,
    catalogs: Sequence[Catalog],
) -> CompareReport:  # fmt: skip
    """Compare the values of the workers under a token with the reference. A worker after the mesh's is the driver."""
    own = run_reference(reference, steps)
    try:
        places = [*itertools.product(*map(range, mesh.sizes)), driver_place(mesh)][: len(workers)]
        read_value = partial(_read_value, agent, token, dict(zip(places, workers, strict=True)))
        movements = _measure_round_off(reference, own, steps, catalogs)
        report = make_report(Runs(own, movements, mesh, dict(zip(places, catalogs, strict=True)), read_value))
        agent.part(Comparisons).show_report(report)
        return report
    finally:
        own.spool.close()


def check_programs(reference: Program, parallel: Program, steps: int) -> None:
    """Raise TypeError or ValueError for arguments of other types."""
    for name, program in (("reference", reference), ("parallel", parallel)):
        if not (isinstance(program, tuple) and len(program) == 2 and all(map(callable, program))):
            raise TypeError(f"{name} is a pair of functions, (make_model, step), and not {program!r}")
    if steps < 1:
        raise ValueError(f"steps={steps}: at least one step is compared")


# -- the reference
def run_reference(
    program: Program, steps: int, perturb: Perturb | None = None, store: StoreValue | None = None
) -> Capture:
    """Run a program in this process, and return what it kept. CompareError if it returns no loss."""
    make_model, step = program
    capture = _run_steps(make_model(), step, steps, (), perturb, store)
    _check_losses(step, steps, [capture.catalog])
    return capture


def _run_steps(
    model: Any, step: Callable[..., Any], steps: int, args: tuple[Any, ...], perturb: Perturb | None = None,
    store: StoreValue | None = None,
) -> Capture:  # fmt: skip
    if not isinstance(model, nn.Module):
        raise CompareError(
            f"the function that makes the model has returned {model!r:.200}, which is no torch.nn.Module. Is it "
            "a pipeline, or RRefs to modules? A program that the notebook drives is compared with driver=True"
        )
    with torch.compiler.set_stance("force_eager"), Capture(model, perturb, store) as capture:
        for _ in range(steps):
            loss = step(model, *args)
            capture.end_step(None if loss is None else check_loss(step, loss))
    return capture


def check_loss(step: Callable[..., Any], loss: Any) -> Tensor | float:
    """Return the loss that a step has returned. CompareError if it is none."""
    if isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1):
        return loss
    raise _no_loss_error(step, _describe(loss))


def _check_losses(step: Callable[..., Any], steps: int, catalogs: Sequence[Catalog]) -> None:
    """Check that each step has returned its loss, on one rank at least: in a pipeline the last stage has it."""
    for turn in range(steps):
        if not any(Key(turn, LOSS, "") in catalog.values for catalog in catalogs):
            hint = ". Of a pipeline, the rank of the last stage returns it, and the others None"
            raise _no_loss_error(step, "None on all ranks" if catalogs[1:] else "None", hint if catalogs[1:] else "")


def _no_loss_error(step: Callable[..., Any], returned: str, hint: str = "") -> CompareError:
    return CompareError(
        f"{spmd.name_of(step)} has returned {returned}, and not its loss: let it return the loss, a number or a tensor "
        f"with one element{hint}"
    )


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


def _measure_round_off(
    program: Program, own: Capture, steps: int, catalogs: Sequence[Catalog]
) -> dict[Key, dict[int, list[float]]]:
    coarser = coarsest_types(catalogs)
    found: dict[Key, dict[int, list[float]]] = {}
    for seed in range(RUNS):
        meter = MovementMeter(own)
        run_reference(program, steps, RoundOff(seed, coarser).move_value, meter.add_value)
        movements = meter.distances()
        if random := [key for key in movements if key.phase == INITIAL and any(movements[key].values())]:
            raise CompareError(
                f"the reference is random: {random[0].name} begins with other values each time. Let the function that "
                "makes the model call torch.manual_seed first"
            )
        if any(_is_random_input(own, key, movements[key]) for key in movements):
            raise CompareError(
                "the reference is random: the model gets other inputs each time. Let its step call torch.manual_seed "
                "before it draws them, or take the batch from outside"
            )
        for key, calls in movements.items():
            for call, distance in calls.items():
                found.setdefault(key, {}).setdefault(call, []).append(distance)
    return found


def _is_random_input(own: Capture, key: Key, distances: Mapping[int, float]) -> bool:
    """Return whether an input of the model moved by more than round-off."""
    if key.phase != INPUT or key.name:
        return False
    norms = {n: norm_of(own.spool.read_tensor(own.catalog.values[key][n].stored)) for n in distances}
    return any(distance > norms[n] * _RANDOM for n, distance in distances.items())


# -- the ranks
captures: dict[str, Capture] = {}
"""On a worker: what a comparison has kept there, by its token."""


def run_rank(token: str, program: Program, mesh: Mesh, steps: int) -> Catalog:
    """Run a program on this rank, and keep its values until `release_capture`. Called on each worker."""
    device_mesh = meshes.make_device_mesh(mesh.names, mesh.sizes)
    make_model, step = program
    model = make_model(*[device_mesh][: _count_arguments(make_model, 1)])
    _refuse_driver(model)
    args = (device_mesh,) if _count_arguments(step, 2) > 1 else ()
    captures[token] = capture = _run_steps(model, step, steps, args)
    return capture.catalog


def _refuse_driver(model: Any) -> None:
    """Raise CompareError for a model that is not on this rank: the program is one that the notebook drives."""
    from rpcbench.compare.driver_parts import find_parts  # here: it loads pipelines

    if found := find_parts(model).elsewhere:
        raise CompareError(
            f"each rank has made a model with a part on {found[0].rref.owner_name()}: a program that the notebook "
            "drives, as a pipeline or by RPC, is compared with driver=True"
        )


def _count_arguments(function: Callable[..., Any], most: int) -> int:
    """Return how many arguments a function takes by place, `most` at most."""
    kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return most
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(most, sum(kind in by_place for kind in kinds))


def read_catalog(name: str) -> Catalog:
    """Return what a variable of this worker's cells has captured. CompareError if there is no such capture."""
    return _find_capture(name).catalog


def read_capture(name: str, kept: Kept) -> Tensor:
    """Return a value that a comparison has kept on this worker, or that a cell has captured."""
    return _find_capture(name).spool.read_tensor(kept.stored)


def _find_capture(name: str) -> Capture:
    found = captures.get(name, vars(sys.modules["__main__"]).get(name))
    if not isinstance(found, Capture):
        raise CompareError(
            f"{name!r} is no capture on this worker: run `with rpcbench.capture(model) as {name}:` in a cell there"
        )
    return found


def release_capture(token: str) -> None:
    """Forget what a comparison has kept on this worker."""
    if (capture := captures.pop(token, None)) is not None:
        capture.close()
        capture.spool.close()


def _read_value(agent: Agent, token: str, workers: Mapping[Coordinate, str], place: Coordinate, kept: Kept) -> Tensor:
    value: Tensor = agent.call(workers[place], read_capture, (token, kept), label=LABEL, own=True).wait()
    return value


def release_captures(agent: Agent, workers: Sequence[str], token: str) -> None:
    """Forget the values that a comparison has kept on these workers, as far as they are left."""
    calls = []
    for worker in workers:
        with suppress(WorkerLostError):
            calls.append(agent.call(worker, release_capture, (token,), label=LABEL, own=True))
    for call in calls:
        with suppress(WorkerLostError):
            call.wait()
