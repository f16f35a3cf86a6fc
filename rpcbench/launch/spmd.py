"""Runs a function on workers at once, as the ranks of a process group: `cluster.spmd(train)`.

Guarantees
- The group exists on all ranks before the function begins, and on none afterwards, also after an error or Ctrl-C: the
  workers can run the next one at once. Nothing begins if a worker is in a process group already.
- The function runs on the main thread of each worker, as a cell, which no restarted worker runs again.
- The first rank that fails ends the others, in a collective, also one of torch, and between collectives. Its own error
  is raised with its traceback; that of each other rank is a RankFailedError that names it.
- The loss of a worker, and a change of the cluster, end all ranks as well.
"""

# Theory of operation
#
#     notebook (run)                on each worker
#     ──────────────                ──────────────
#     size_here ──────────────────► pool thread: is there a group?
#     open_store ─────────────────► pool thread of rank 0: the store where the ranks meet
#     found ──────────────────────► pool thread: make the group, together
#     CellClient.run ─────────────► main thread: SpmdRank, which calls the function
#     end ────────────────────────► pool thread: end the group
#
# A rank that fails writes the reason into the store of the world (`World.break_on_all_ranks`, where the first one wins)
# and calls `end_world` on the others. There `World.break_on_this_rank` ends the waits for collectives, and interrupts
# the function by way of `World.call_when_closed`. The error that this causes in the function is replaced by the reason.
# After Ctrl-C the notebook calls `end_world` on all ranks, beside the interrupts of the cell, which do not reach a rank
# that waits in torch.

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d

from rpcbench.base.config import RANK_NAMES
from rpcbench.base.errors import CollectiveError, RankFailedError, RpcTimeoutError, WorkerLostError
from rpcbench.base.futures import Future, wait_all
from rpcbench.base.sources import ipython_shell
from rpcbench.cells.client import PATIENCE, CellClient, CellInputs, CellOptions
from rpcbench.cells.display import OutputDisplay
from rpcbench.cells.runner import CellRunner
from rpcbench.cells.targets import Targets
from rpcbench.cells.tracebacks import Failed, combined_error, error_message
from rpcbench.compare.type_annotations import import_types
from rpcbench.distributed import group_functions, groups, stores
from rpcbench.distributed.stores import wait_until
from rpcbench.distributed.world import DETECTION_SECONDS, World
from rpcbench.launch import meshes, ranks
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.current import current_agent

_SECONDS = 600.0  # for a call that makes the group: later than the group's own deadline, whose error names a rank
_END = "the end of the process group"  # the label of a call, in errors
_NAMELESS = "<lambda>"  # the name of functions without one
_VARIABLE = "_spmd"  # of the cell: the SpmdRank, then its result


def select_ranks(there: Sequence[str], lost: Sequence[str], workers: str | Sequence[str]) -> list[str]:
    """Return the workers by rank. WorkerLostError if one that may be meant is lost."""
    listed = [workers] if isinstance(workers, str) else workers
    words = [part for word in listed for part in word.split(",") if part]
    names = Targets().select_workers(words, there)
    if lost and not set(words) <= {*names}:  # "all" or a slice
        raise WorkerLostError(
            f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost: start it again with "
            f"cluster.restart({lost[0]!r}), or name the workers that shall run the function: workers={names}"
        )
    return names


def run_program(
    agent: Agent, names: Sequence[str], backend: str | None, program: partial[Any], label: str | None = None,
    typecheck: bool = False, deed: str = "cluster.spmd", environ: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:  # fmt: skip
    """Run the program on each of these workers as a rank, and return the results by rank. See `BaseCluster.spmd`.
    `label`: its name in errors; None: that of its function. `deed`: what the user called, for the list of cells.
    `environ`: more variables that the ranks have meanwhile."""
    if typecheck:
        import_types()  # its errors are read here
    for name in names:
        # an unknown or lost one is an error before anything begins
        agent.calls.sources.check_function(agent.member(name).id, program)
    label = label or name_of(program.func)
    if typecheck:
        program = partial(check_types, program)
    _refuse_groups(agent, names)
    place: StorePlace = agent.call(names[0], open_store, label=ranks.GROUP, own=True).wait()
    try:
        token = _make_group(agent, names, place, backend)
        results = _run_and_collect(agent, names, program, token, label, deed, environ)
    except BaseException:
        _wait_for_calls(_call_ranks(agent, names, end_group, place, seconds=PATIENCE))
        raise
    _wait_for_calls(_call_ranks(agent, names, end_group, place))
    return results


def _refuse_groups(agent: Agent, names: Sequence[str]) -> None:
    sizes: list[int] = wait_all(
        [agent.call(name, groups.default_group_size, label=ranks.GROUP, own=True) for name in names]
    )
    if inside := [name for name, size in zip(names, sizes, strict=True) if size]:
        raise CollectiveError(
            f"{', '.join(inside)} {'is' if len(inside) == 1 else 'are'} in a process group already, and spmd makes its "
            "own: run rpcbench.distributed.destroy_process_group() there first, or cluster.restart"
            f"({inside[0]!r})"
        )


def _make_group(agent: Agent, names: Sequence[str], place: StorePlace, backend: str | None) -> str:
    """Make the process group on all ranks, and return the token of its world."""
    calls = [
        agent.call(
            name, init_default_group, (place, rank, len(names), backend), timeout=_SECONDS, label=ranks.GROUP, own=True
        )
        for rank, name in enumerate(names)
    ]
    try:
        tokens: list[str] = wait_all(calls)
    except CollectiveError as error:
        raise CollectiveError(*error.args) from None  # without the worker's traceback, which has no line of the user
    return tokens[0]


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for errors; of an object that can be called, that of its class."""
    return getattr(function, "__name__", type(function).__name__)


def _run_and_collect(
    agent: Agent, names: Sequence[str], program: partial[Any], token: str, label: str, deed: str,
    environ: Mapping[str, str],
) -> list[Any]:  # fmt: skip
    """Run the program in a cell, and raise the error of the rank that failed first."""
    places = _make_environments(agent, names, token)
    own = {
        name: {_VARIABLE: SpmdRank(program, label, tuple(each for each in names if each != name), {**place, **environ})}
        for name, place in places.items()
    }
    stopped = CollectiveError(_stop_text(label))

    def end_others(name: str, error: Exception) -> None:
        """End the others: a rank that fails before its function begins cannot do that itself."""
        if not isinstance(error, RankFailedError | WorkerLostError):  # the worlds themselves hear of a lost rank
            reason = _make_failure(f"rank {names.index(name)} ({name})", label, error)
            _call_ranks(agent, [each for each in names if each != name], end_world, token, reason)

    options = CellOptions(
        replayed=False, on_stop=lambda: _call_ranks(agent, names, end_world, token, stopped), on_failure=end_others,
        listed=f"# {deed}({'' if label == _NAMELESS else label}), on each rank",
    )  # fmt: skip
    code, inputs = f"{_VARIABLE} = {_VARIABLE}()  # {label}", CellInputs(want=(_VARIABLE,), own=own)
    answer = agent.part(CellClient).run(OutputDisplay(shell := ipython_shell()), names, code, inputs, options)
    if answer.failures:
        raise combined_error(_first_cause_first(answer.failures), shell)
    return [answer.values[name][_VARIABLE] for name in names]


def _make_failure(rank: str, label: str, error: BaseException) -> RankFailedError:
    said = error_message(error).removesuffix(": ")
    return RankFailedError(f"{rank} failed in {label}: {said}")


def _first_cause_first(failures: Sequence[Failed]) -> list[Failed]:
    """Return failures in the order of their causes; of those that another rank has caused only the last line."""
    ended = [failed._replace(lines=[]) for failed in failures if isinstance(failed.error, RankFailedError)]
    causes = [failed for failed in failures if not isinstance(failed.error, RankFailedError)]
    return [*sorted(causes, key=lambda failed: failed.stopped), *ended]


def _make_environments(agent: Agent, names: Sequence[str], run_id: str) -> dict[str, dict[str, str]]:
    """Return torchrun's variables for each worker: libraries ask for them to tell a rank from a notebook."""
    there = agent.machine.read_node(lambda node: {one.name: one for one in node.members.members.values()})
    order = {name: rank for rank, name in enumerate(names) if name in there}  # others were lost just now
    size, hosts = len(names), list(dict.fromkeys(there[name].host for name in order))
    common = {
        "WORLD_SIZE": str(size), RANK_NAMES: ",".join(names), "GROUP_WORLD_SIZE": str(len(hosts)),
        "ROLE_NAME": "default", "ROLE_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    return {
        name: {
            "RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": str(hosts.index(there[name].host)),
            **common, **ranks.local_rank_variables(name, size, order, there),
        }
        for name, rank in order.items()
    }  # fmt: skip


def _call_ranks(
    agent: Agent, names: Sequence[str], function: Callable[..., None], *args: Any, seconds: float = _SECONDS
) -> list[Future[None]]:
    calls = []
    for name in names:
        with contextlib.suppress(WorkerLostError):
            calls.append(agent.call(name, function, args, timeout=seconds, label=_END, own=True))
    return calls


def _wait_for_calls(calls: Sequence[Future[None]]) -> None:
    for call in calls:
        # A worker whose code lets no other thread run ends its group once that lets go.
        with contextlib.suppress(WorkerLostError, RpcTimeoutError):
            call.wait()


# -- on workers
class StorePlace(NamedTuple):
    """The store where the ranks of one run meet."""

    address: str
    port: int
    run: str  # unique


@dataclass(frozen=True, slots=True)
class SpmdRank:
    """The function on one rank."""

    program: partial[Any]
    label: str  # its name, for errors
    others: tuple[str, ...]  # workers
    environ: Mapping[str, str]

    def __call__(self) -> Any:
        """Call the function on the main thread, in the cell that this value was sent with."""
        vars(sys.modules["__main__"]).pop(_VARIABLE, None)  # it keeps the arguments alive
        agent, world = current_agent(), groups.member_of(None, at_work=False).world
        try:
            with agent.part(CellRunner).interruptible_block() as interrupt, contextlib.ExitStack() as meanwhile:

                def end_function() -> None:
                    # A function that ends its world itself raises the reason, or has destroyed its group.
                    if threading.current_thread() is not threading.main_thread():
                        # On a thread of its own: the one that ends the world then has torch's waits to end.
                        agent.submit(interrupt)

                meanwhile.callback(world.call_when_closed(end_function))
                meanwhile.enter_context(_set_environment({**_prepare_accelerate(), **self.environ}, world))
                meanwhile.enter_context(_as_script())
                world.raise_if_broken()  # another rank may have failed before this one began
                return self.program()
        except BaseException as error:
            self._end_after_failure(agent, world, error)
            raise

    def _end_after_failure(self, agent: Agent, world: World, error: BaseException) -> None:
        """End the other ranks; raise the reason if the world has ended before, and this error is its consequence."""
        me = world.rank_label(world.rank)
        # by the function itself, as torchrun's programs do at their end
        if str(world.failure_reason()) == groups.DESTROYED:
            self._end_others(agent, world, _make_failure(me, self.label, error))
            return
        if _is_of_backend(error):  # perhaps because a rank has ended, which is reported a little later
            wait_until(lambda: world.poll_failure() or bool(world.ended_ranks()), DETECTION_SECONDS)
            if gone := world.ended_ranks():
                world.break_on_all_ranks(world.lost_ranks_error(gone, f"while {me} was in {self.label}"))
        mine = _make_failure(me, self.label, error)
        world.break_on_all_ranks(mine)
        reason = world.failure_reason()
        assert reason is not None, "it is broken"
        if str(reason) == str(error):
            return
        if str(reason) != str(mine):
            # Where this rank was does not matter to such an error, and IPython is slow to show torch's lines.
            is_elsewhere = isinstance(reason, RankFailedError) or str(reason) == _stop_text(self.label)
            raise reason from (None if is_elsewhere else error)
        self._end_others(agent, world, mine)

    def _end_others(self, agent: Agent, world: World, reason: RankFailedError) -> None:
        for other in self.others:
            with contextlib.suppress(WorkerLostError):
                agent.call(other, end_world, (world.token, reason), label=_END, own=True)


def _stop_text(label: str) -> str:
    return f"the notebook has stopped {label}"


def _is_of_backend(error: BaseException) -> bool:
    """Return whether torch's communication has failed; gloo's errors have no class of their own."""
    return isinstance(error, c10d.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


@contextlib.contextmanager
def _set_environment(wanted: Mapping[str, str], world: World) -> Iterator[None]:
    """Set variables of the environment meanwhile. After a change of the cluster they have the values of that."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    if current_agent().config.gpu:  # CUDA shows this worker one GPU, and programs select number LOCAL_RANK
        os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        for name, value in () if world.outdated else before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _as_script() -> Iterator[None]:
    """Hide the prompt of a kernel meanwhile: by it libraries take the process for one where a person types."""
    prompt = vars(sys).pop("ps1", None)
    try:
        yield
    finally:
        if prompt is not None:
            sys.ps1 = prompt


def _prepare_accelerate() -> dict[str, str]:
    """Have the next `Accelerator()` look at this run, as accelerate keeps rank, size and precision of a process's first
    one. Returns the variable without which it takes a rank that has no GPU for a process of its own."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    name = "ACCELERATE_USE_CPU"
    return {} if name in os.environ or torch.accelerator.is_available() else {name: "yes"}


def check_types(program: partial[Any]) -> Any:
    """Call a function while spmd_types checks its types, over a mesh of all ranks. SpmdTypeError if they are wrong."""
    library = import_types()
    mesh = meshes.make_device_mesh(("rank",), (c10d.get_world_size(),))
    with library.set_current_mesh(mesh), library.checker.typecheck():
        return program()


def open_store() -> StorePlace:
    """Host the store where the ranks meet. Called on rank 0."""
    address = ranks.address_here()
    return StorePlace(address, stores.host_store_at(address), secrets.token_hex(8))


_over: deque[StorePlace] = deque(maxlen=64)
"""The runs that have ended here."""


def init_default_group(place: StorePlace, rank: int, size: int, backend: str | None) -> str:
    """Make the default process group together with the other ranks, and return the token of its world."""
    if backend is not None:
        groups.torch_backend(backend)  # a wrong one is an error before any rank is waited for
    at = stores.InitMethod(address=place.address, port=place.port, hosts_store=False)
    store = stores.store_at(at, groups.RENDEZVOUS_SECONDS)
    group_functions.init_process_group(backend, store=store, rank=rank, world_size=size)
    if place in _over:  # after Ctrl-C `end_group` can come first: it notes the run before it looks for a group
        groups.destroy_all_groups()
        raise CollectiveError("the notebook has ended this run before its process group was there")
    return groups.member_of(None).world.token


def end_world(token: str, reason: CollectiveError) -> None:
    """End the world of this token, if it is the one here, for a reason that comes from elsewhere."""
    with contextlib.suppress(CollectiveError):  # there is none any more
        world = groups.member_of(None, at_work=False).world
        if world.token == token:
            world.break_on_this_rank(reason)


def end_group(place: StorePlace) -> None:
    """End the process group here, and release the store."""
    _over.append(place)
    vars(sys.modules["__main__"]).pop(_VARIABLE, None)  # the result, which may be large
    groups.destroy_all_groups()
    stores.forget_store(place.address, place.port)
