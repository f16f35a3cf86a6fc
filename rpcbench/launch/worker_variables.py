"""The variables of workers' cells, read and written from the notebook: `cluster["worker1"]["x"]`, scatter and gather.

Guarantees
- Each operation is a call, which a pool thread of the worker serves: it works while a cell runs there.
- Only the values that are asked for travel. Listing, counting and deleting variables send none.
- A value that is set here is in the worker's history: a restarted worker that runs its cells again gets it, too.
- A missing variable is an UnknownVariableError, which is a KeyError; a lost worker is a WorkerLostError.
"""

from __future__ import annotations

import contextlib
import keyword
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from rpcbench.base.errors import SerializationError, UnknownVariableError, UnknownWorkerError
from rpcbench.base.futures import wait_all
from rpcbench.base.sources import ipython_shell
from rpcbench.cells.client import CellClient
from rpcbench.cells.partition import Dimension, check_combination, combine_values, split, value_layout
from rpcbench.cells.targets import Targets
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.current import current_agent

_LIST = "the list of variables"  # the label of calls, in errors


class WorkerVariables(MutableMapping[str, Any]):
    """The variables of one worker's cells, by name: `cluster["worker1"]`.

    Names that begin with an underscore, and those that IPython has defined, are not listed.
    """

    def __init__(self, agent: Agent, worker: str) -> None:
        self._agent = agent
        self._worker = worker

    def __getitem__(self, name: str) -> Any:
        return fetch_values(self._agent, name, [self._worker])[0]

    def __setitem__(self, name: str, value: Any) -> None:
        assign_values(self._agent, name, {self._worker: value})

    def __delitem__(self, name: str) -> None:
        with _without_traceback(name, self._worker):
            self._agent.call(self._worker, delete_variable, (name,), label=f"del {name}", own=True).wait()
        self._agent.part(CellClient).record_change(self._worker, f"globals().pop({name!r}, None)", {})

    def __contains__(self, name: object) -> bool:
        return bool(self._agent.call(self._worker, has_variable, (name,), label=_LIST, own=True).wait())

    def __iter__(self) -> Iterator[str]:
        return iter(self._list_variables())

    def __len__(self) -> int:
        return len(self._list_variables())

    def clear(self) -> None:
        """Delete all variables that are listed."""
        for name in self:  # that of the base class would bring each value here
            del self[name]

    def _list_variables(self) -> dict[str, str]:
        there: dict[str, str] = self._agent.call(self._worker, list_variables, label=_LIST, own=True).wait()
        return there

    def __repr__(self) -> str:
        there = self._list_variables()
        if not there:
            return f"{self._worker} has no variables"
        width = max(map(len, there))
        return "\n".join([f"{self._worker} has:", *(f"  {name:{width}}  {kind}" for name, kind in there.items())])


def variables_of_worker(agent: Agent, workers: Sequence[str], name: object) -> WorkerVariables:
    """Return the variables of a worker. TypeError for a key that is no name."""
    if not isinstance(name, str):  # Python asks for number 0 to iterate over an object without `__iter__`
        raise TypeError(f"a cluster has its workers by name, not by {name!r}: cluster['worker1']['x'] is a variable")
    if name not in workers:
        agent.member(name)  # raises the error for one that is lost, or that there never was
        raise UnknownWorkerError.of(name, workers)
    return WorkerVariables(agent, name)


def scatter(
    agent: Agent, there: Sequence[str], name: str, value: Any, dim: Dimension, workers: str | Sequence[str]
) -> dict[str, int]:
    """Set a part of the value as a variable on each worker. See `BaseCluster.scatter`."""
    names = _select_workers(agent, there, workers)
    parts = split(name, value, len(names), dim)
    assign_values(agent, name, dict(zip(names, parts.values, strict=True)))
    return dict(zip(names, parts.sizes, strict=True))


def gather(
    agent: Agent, there: Sequence[str], name: str, how: str, dim: Dimension, workers: str | Sequence[str]
) -> Any:
    """Return the values of a variable on all workers as one. See `BaseCluster.gather`."""
    check_combination(how)
    names = _select_workers(agent, there, workers)
    return combine_values(name, dict(zip(names, fetch_values(agent, name, names), strict=True)), how, dim)


def _select_workers(agent: Agent, there: Sequence[str], workers: str | Sequence[str]) -> list[str]:
    """Return the selected workers; the error for one that is not there comes before anything is sent."""
    names = Targets().select_workers([workers] if isinstance(workers, str) else workers, there)
    for name in names:
        agent.member(name)
    return names


def fetch_values(agent: Agent, name: str, workers: Sequence[str]) -> list[Any]:
    calls = [agent.call(worker, read_variable, (name,), label=name, own=True) for worker in workers]
    values = []
    for worker, call in zip(workers, calls, strict=True):
        with _without_traceback(name, worker):
            values.append(call.wait())
    return values


@contextlib.contextmanager
def _without_traceback(name: str, worker: str) -> Iterator[None]:
    """Raise errors on a variable without the worker's traceback, which has no line of the user."""
    try:
        yield
    except UnknownVariableError as error:
        raise UnknownVariableError(*error.args) from None
    except SerializationError as error:
        raise SerializationError(
            f"the value of {name} on {worker} cannot be sent ({error}): take an RRef of it, "
            f"%%remote {worker} --rref {name}"
        ) from None


def assign_values(agent: Agent, name: str, values: Mapping[str, Any]) -> None:
    """Set a variable on each worker that `values` names. ValueError for a name that no variable can have."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is not the name of a variable")
    wait_all(
        [agent.call(worker, write_variable, (name, value), label=name, own=True) for worker, value in values.items()]
    )
    for worker, value in values.items():
        agent.part(CellClient).record_change(worker, f"# {name} was set from the notebook", {name: value})


# -- on workers, on a pool thread
def _cell_namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])  # of the cells, on every kind of worker


def _missing_error(name: str) -> UnknownVariableError:
    return UnknownVariableError.of(current_agent().name, name, list_variables())


def list_variables() -> dict[str, str]:
    """Return the layout or type of each variable that is listed, by name."""
    shell = ipython_shell()
    hidden = {} if shell is None else shell.user_ns_hidden  # names that IPython has defined, with their values
    return {
        name: value_layout(value)
        for name, value in _cell_namespace().copy().items()  # a copy: cells change it meanwhile
        if not name.startswith("_") and hidden.get(name, hidden) is not value
    }


def has_variable(name: object) -> bool:
    return name in _cell_namespace()


def read_variable(name: str) -> Any:
    if name not in (space := _cell_namespace()):
        raise _missing_error(name)
    return space[name]


def write_variable(name: str, value: Any) -> None:
    _cell_namespace()[name] = value


def delete_variable(name: str) -> None:
    try:
        del _cell_namespace()[name]
    except KeyError:
        raise _missing_error(name) from None
