"""A cell sent from plain Python: what `Cluster.run` does. In a notebook, displays look as those of `%%remote`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rpcbench.launch.desk import Ask, CellDesk, Way
from rpcbench.launch.history import Past, Rerun, replay
from rpcbench.launch.screen import Screen, unseen
from rpcbench.launch.targets import Targets

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent

Words = str | Sequence[str]


def run(
    agent: Agent, there: Sequence[str], workers: Words, code: str, push: Mapping[str, Any] | None, want: Iterable[str],
    timeout: float | None,
) -> Any:  # fmt: skip
    """Run the cell on those of the workers that are `there` whom `workers` means. See `Cluster.run`."""
    names = Targets().find([workers] if isinstance(workers, str) else workers, there)
    wanted = (want,) if isinstance(want, str) else tuple(want)
    ask = Ask(dict(push or {}), wanted, value=not wanted)
    shell = _shell()
    answer = agent.part(CellDesk).run(Screen(shell), names, code, ask, Way(math.inf if timeout is None else timeout))
    if (error := answer.error(shell)) is not None:
        raise error
    values = answer.by_name(several=[workers] != names)
    return values if wanted else values[""]


def rerun(agent: Agent, worker: str, past: Past) -> list[Rerun]:
    """Run what a worker had run again, on the one that is there now, unseen."""

    def run(code: str, push: dict[str, Any]) -> BaseException | None:
        failures = agent.part(CellDesk).run(Screen(None), [worker], code, Ask(push), Way(panes=unseen)).failures
        return failures[0].error if failures else None

    return replay(past, run)


def _shell() -> Any:
    """IPython's, if that is where we are."""
    loaded = sys.modules.get("IPython")
    return None if loaded is None else loaded.get_ipython()
