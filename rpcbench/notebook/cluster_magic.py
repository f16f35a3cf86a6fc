"""The actions of `%cluster`: start, inspect, change and stop the workers of a notebook. Each returns a text or a table.

`stop`, unloading the extension, and exit stop the clusters that were started here, and leave those that were joined.
Several clusters may run, each under a name. All magics and `rpcbench.cluster()` use the current one.

`ClusterSummary` describes the clusters of a notebook as small dicts, for the sidebar. It sends nothing to workers. It
rounds figures, so that an idle cluster does not look changed. Both use the same wording.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from IPython.core.error import UsageError
from IPython.display import DisplayHandle

from rpcbench.base.errors import count_noun
from rpcbench.cells.history import Rerun
from rpcbench.cells.targets import Targets
from rpcbench.launch import process, saved, stacks, status
from rpcbench.launch.actions import interrupt_workers
from rpcbench.launch.base_cluster import MAIN, BaseCluster, name_new_cluster, running_clusters
from rpcbench.launch.cluster import Cluster, Progress, cluster
from rpcbench.launch.registry import KINDS
from rpcbench.launch.status import ClusterStatus, ProcessSampler, WorkerStatus
from rpcbench.notebook import warn_on_stderr
from rpcbench.notebook.parsers import HOW_MANY, cluster_line, parse_size
from rpcbench.runtime.checks import count_rrefs
from rpcbench.telemetry.attached_job import AttachedJob, attach
from rpcbench.testing.stepper import Stepper

NONE_RUNS = "No cluster runs. %cluster start 2 starts two workers."


def restart_report(names: list[str]) -> str:
    return f"Started again: {', '.join(names)}. {'Its' if len(names) == 1 else 'Their'} variables are lost."


def sentence(found: BaseCluster) -> str:
    names = found.workers
    lost = f"; lost: {', '.join(found.lost)}" if found.lost else ""
    return f"{count_noun(len(names), 'worker')}: {', '.join(names)}{lost}."


def replay_report(name: str, cells: list[Rerun]) -> str:
    """Report the replay of a worker's cells: in one line, and one more for each cell that failed."""
    failed = [cell for cell in cells if cell.error is not None]
    if not cells:
        return f"{name} had run no cell."
    if not failed:
        return f"{name} has run its {count_noun(len(cells), 'cell')} again."
    lines = [f"  {stacks.shorten_code(cell.code)}  ->  {type(cell.error).__name__}: {cell.error}" for cell in failed]
    return "\n".join([f"{name} has run its {count_noun(len(cells), 'cell')} again; {len(failed)} failed:", *lines])


ClusterState = dict[str, Any]


class ClusterSummary:
    """Summaries of clusters. A worker's CPU share covers the time since the last summary."""

    def __init__(self) -> None:
        self._looks = ProcessSampler(memory=False)
        self._numbers: WeakKeyDictionary[BaseCluster, int] = WeakKeyDictionary()
        self._count = itertools.count(1)

    def summarize_clusters(
        self, clusters: Mapping[str, BaseCluster], current: BaseCluster | None
    ) -> list[ClusterState]:
        return [self._summarize_cluster(name, one, one is current) for name, one in clusters.items()]

    def _summarize_cluster(self, name: str, one: BaseCluster, is_current: bool) -> ClusterState:
        number = self._numbers.setdefault(one, next(self._count))  # another one under this name has another number
        return {
            "name": name, "number": number, "kind": one.kind, "current": is_current,
            "workers": self._summarize_workers(one)
        }  # fmt: skip

    def _summarize_workers(self, one: BaseCluster) -> list[ClusterState]:
        serving = {*one.workers}
        stepper = Stepper.present(one.agent)
        held = stepper.count_held_calls() if stepper is not None else Counter[str]()
        rrefs = count_rrefs(one.agent)
        return [
            {**summarize_worker(row, row.name in serving, held[row.name]), "rrefs": rrefs[row.name]}
            for row in self._looks.sample_workers(one.watched())
        ]


def summarize_worker(row: WorkerStatus, serves: bool, held: int = 0) -> ClusterState:
    """Summarize one worker. `serves` is False while it starts; a stepper holds `held` of its calls."""
    note = "" if row.state in ("ready", "stopped") else row.state
    now = "busy" if row.calls > held else "ready"
    return {
        "name": row.name,
        "state": "lost" if note else "stopped" if row.state == "stopped" else now if serves else "starting",
        "note": note,  # how it was lost
        "start": row.incarnation + 1,  # 1 for the first process of its name, 2 after a restart
        "cpu": round(100 * (row.cpu or 0)),  # per cent of a core; 0 if unknown
        "calls": row.calls,  # from here, without a reply yet; "busy" means at least one that nobody holds
        "held": min(held, row.calls),  # of these, those that wait for a held message
    }


_WIDTH = 20  # characters of the progress bar


class Starting:
    """The progress bar of a start. Call it with the number of workers that serve, and of all."""

    def __init__(self, of: int) -> None:
        self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
        self._shown_count = 0  # the number that is shown
        self._handle.display(_progress_bundle(0, of), raw=True)  # type: ignore[no-untyped-call]

    def __call__(self, serve: int, of: int) -> None:
        if serve != self._shown_count:
            self._shown_count = serve
            self._handle.update(_progress_bundle(serve, of), raw=True)  # type: ignore[no-untyped-call]


def _progress_bundle(serve: int, of: int) -> dict[str, str]:
    full = _WIDTH * serve // of
    return {"text/plain": f"{'█' * full}{'░' * (_WIDTH - full)} {serve} of {of} workers ready"}


Words = list[str]
Way = dict[str, Any]


class StartReports(NamedTuple):
    """The reports of a start while it lasts."""

    progress: Callable[[int], Progress]  # takes the number of workers; see `Cluster`'s `progress`
    warn: Callable[[str], object]  # takes a warning about scarce memory
    note: Callable[[str], object]  # takes a sentence on shared cores


IN_CELL = StartReports(Starting, warn_on_stderr, print)


class Commands:
    """The actions, by name. `bind(cluster)` assigns a cluster to the notebook's variable `cluster`."""

    def __init__(self, targets: Targets, bind: Callable[[BaseCluster], object]) -> None:
        self.named: dict[str, BaseCluster] = {}
        self.started: list[BaseCluster] = []  # and joined: those to shut down in the end
        self.job: AttachedJob | None = None  # that `%cluster stack` shows while no cluster runs
        self._targets = targets
        self._bind = bind

    def run_action(self, action: str, words: Words) -> Any:
        """Run an action and return its result. Raises UsageError for an unknown action or option."""
        options = cluster_line().action(action).parse(words)
        deed: Callable[..., Any] = getattr(self, f"_{action}")
        return deed(**vars(options))

    def _start(self, size: str | None, words: Words, name: str | None, **arguments: Any) -> str:
        words = [size or "", *words]
        arguments["options"] = dict(word.split("=", 1) for word in words if "=" in word)
        arguments["env"] = dict(arguments["env"] or ())
        arguments = {option: value for option, value in arguments.items() if value not in (None, {})}
        plain = [word for word in words if word and "=" not in word]
        if not plain or not plain[0][:1].isalpha():
            return self.start_cluster(_parse_one_size(plain), arguments, name)
        with _as_usage_error():
            found = saved.find_cluster(plain[0])
            arguments = found.merge_arguments(arguments)
        number = _parse_one_size(plain[1:] or [str(arguments["n"])])
        del arguments["n"]
        return f"{self.start_cluster(number, arguments, name or found.name)} {found.file} describes {plain[0]}."

    def start_cluster(
        self, size: int, arguments: Way | None = None, name: str | None = None, voice: StartReports = IN_CELL
    ) -> str:
        """Start a cluster, unless it runs, and make it the current one. `arguments` has arguments of `Cluster`."""
        self._adopt_current()  # first: a cluster that has ended must not keep its name
        arguments = arguments or {}
        found = running() if name is None else self.named.get(name)
        if found is None:
            with name_new_cluster(name or MAIN):
                found = self.named[name or MAIN] = self._make_cluster(size, arguments, voice)
        elif others := _describe_differences(arguments, found):
            raise UsageError(
                f"the cluster that runs was not started with {others}: %cluster stop ends it, then start it again; or "
                "start another one beside it: --name other"
            )
        elif len(found.workers) != size:
            return f"{sentence(found)} %cluster scale {size} makes it {size}."
        return f"{self._make_current(found)} %%remote {found.workers[0]} runs a cell there, %cluster stop ends it."

    def _make_cluster(self, size: int, arguments: Way, voice: StartReports) -> BaseCluster:
        warn_of_resources(size, arguments.get("launcher") or arguments.get("kind", "process"), voice.warn, voice.note)
        with _as_usage_error():  # a mistake in the arguments, such as options of a launcher
            made = Cluster(size, **arguments, progress=voice.progress(size))
        self.started.append(made)  # not before: `_adopt_current` on the thread of a page replaces the list meanwhile
        return made

    def _join(self, address: str, name: str | None) -> str:
        self._adopt_current()
        name = name or MAIN
        if name in self.named:
            raise UsageError(f"{name} is a cluster already: %cluster stop first, or give a name: --name other")
        with _as_usage_error(), name_new_cluster(name):
            found = self.named[name] = Cluster.join(address)
        self.started.append(found)
        return f"{self._make_current(found)} %%remote {found.workers[0]} runs a cell there, %cluster stop leaves them."

    def _attach(self, address: str) -> AttachedJob:
        with _as_usage_error():
            self.job = attach(address)
        return self.job

    def _make_current(self, found: BaseCluster) -> str:
        """Make a cluster the current one, and describe it."""
        found.prefer()
        self._bind(found)
        return sentence(found)

    def running_clusters(self) -> dict[str, BaseCluster]:
        """Return the running clusters by name, also those that were not made by a magic."""
        there = {name: one for name, one in list(self.named.items()) if one.agent.running}
        others = {name: one for name, one in running_clusters().items() if one not in there.values()}
        return there | others

    def _adopt_current(self) -> None:
        """Forget clusters that have ended, and name those that were not made by a magic."""
        for one in self.started:
            if one.over:
                one.shutdown()
        self.named = self.running_clusters()
        self.started = [one for one in self.started if one.agent.running]

    def _list(self) -> str:
        self._adopt_current()
        current = running()
        lines = [f"{'*' if one is current else ' '} {name}: {sentence(one)}" for name, one in self.named.items()]
        return "\n".join(lines) or NONE_RUNS

    def _use(self, name: str | None) -> str:
        return f"{name}: {self._make_current(self._find_named(name, 'use'))}"

    def _find_named(self, name: str | None, action: str) -> BaseCluster:
        self._adopt_current()
        if name not in self.named:
            raise UsageError(f"say which: %cluster {action} NAME; there are {', '.join(self.named) or 'none'}")
        return self.named[name]

    def _status(self, as_json: bool) -> Any:
        found = running()
        if as_json:
            return json.dumps((ClusterStatus() if found is None else found.status()).json(), indent=1)
        return NONE_RUNS if found is None else found.status()

    def _scale(self, size: int) -> str:
        found = cluster()
        if size > len(found.workers):
            warn_of_resources(size, found.kind, IN_CELL.warn, IN_CELL.note)
        with _as_usage_error():  # more workers than GPUs
            found.scale(size)
        return sentence(found)

    def _restart(self, workers: Words, replay: bool) -> str:
        found = cluster()
        there = [row.name for row in found.status()]  # with lost workers, which `found.workers` leaves out
        names = self._targets.select_workers(workers, there)
        again = [replay_report(name, found.restart(name, replay=replay)) for name in names]
        return "\n".join([f"Started again: {', '.join(names)}.", *again]) if replay else restart_report(names)

    def _reload(self, modules: Words) -> str:
        found = cluster()
        found.reload(*modules)
        return f"Reloaded: {', '.join(modules)}, here and on {', '.join(found.workers)}."

    def _interrupt(self, workers: Words) -> str:
        found = cluster()
        return interrupt_workers(found, self._targets.select_workers(workers or ["all"], found.workers))

    def _stack(self, workers: Words) -> str:
        if self.job is not None and running() is None:
            return self.job.stack(*workers)
        found = cluster()
        return stacks.stack_report(
            found.agent, self._targets.select_workers(workers or ["all"], found.workers), found.watched()
        )

    def _logs(self, workers: Words) -> str:
        found = cluster()
        names = self._targets.select_workers(workers or ["all"], [row.name for row in found.status()])
        logs = {name: found.log(name) or "(nothing outside cells)" for name in names}
        return "\n".join(f"[{name}] {line}" for name, text in logs.items() for line in text.splitlines())

    def _group(self, name: str | None, workers: Words) -> str:
        if name is None:
            groups = self._targets.groups.items()
            return "\n".join(f"{group}: {' '.join(meant)}" for group, meant in groups) or "No group is saved."
        if not workers:
            raise UsageError("say which workers: %cluster group trainers worker1 worker2, %cluster group rest [1:]")
        names = self._targets.save_group(name, workers, cluster().workers)
        return f"{name}: {', '.join(names)}. %%remote {name} runs a cell there."

    def _stop(self, name: str | None) -> str:
        found = running() if name is None else self._find_named(name, "stop")
        if found is None:
            return "No cluster runs."
        found.shutdown()
        return self.cluster_stopped(found)

    def cluster_stopped(self, found: BaseCluster) -> str:
        """Report that a cluster was stopped, and make another one that runs the current one."""
        names = {id(one): f"{name}: " for name, one in self.named.items()}
        self._adopt_current()
        left = running()
        if left is None:
            return found.farewell
        names |= {id(one): f"{name}: " for name, one in self.named.items()}
        told = f"{names.get(id(found), '')}{found.farewell}"
        return f"{told} The current cluster is {names[id(left)]}{self._make_current(left)}"

    def stop_started_clusters(self) -> None:
        """Stop the clusters that were started here, and leave those that were joined."""
        for one in self.started:
            one.shutdown()


def running() -> BaseCluster | None:
    try:
        return cluster()
    except RuntimeError:
        return None


def warn_of_resources(
    size: int, kind: str, warn: Callable[[str], object], note: Callable[[str], object]
) -> None:
    """Warn of memory that this host lacks for that number of workers, before they start; note that they share cores."""
    mode = process.default_mode() if kind in ("process", "local") else kind
    if shared := status.describe_cores(size, mode):
        note(shared)
    if lacking := status.warn_of_memory(size, mode):
        warn(lacking)


def _describe_differences(arguments: Way, found: BaseCluster) -> str:
    """Return the options that a running cluster was not started with, as words of a line; empty if there are none."""
    ours = _line_options({**found.arguments, "kind": found.kind})
    others = {option: value for option, value in _line_options(arguments).items() if value != ours.get(option)}
    has = {option: f"it has {option}{ours[option]}" if option in ours else "it has none" for option in others}
    return ", ".join(f"{option}{value} ({has[option]})" for option, value in others.items())


def _line_options(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments of `Cluster` as words of `%cluster start`: each option with its value."""
    plain = {
        name: arguments[name] for name in ("address", "gpus", "grace", "patience") if arguments.get(name) is not None
    }
    kind = arguments.get("launcher") or arguments.get("kind")
    options = {
        **(arguments.get("options") or {}),
        **({"python": arguments["python"]} if arguments.get("python") else {}),
    }
    line = {f"--{name} ": value for name, value in plain.items()}
    line |= {"--launcher ": KINDS.get(kind, kind)} if kind else {}
    line |= {f"--env {name}=": value for name, value in (arguments.get("env") or {}).items()}
    line |= {f"{name}=": value for name, value in options.items()}
    return {option: _format_value(value) for option, value in line.items()}


def _format_value(value: object) -> str:
    """Return a value as it stands on a line: files and Python have numbers and lists."""
    if isinstance(value, list | tuple):
        return ",".join(map(_format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def _as_usage_error() -> Iterator[None]:
    """Raise a ValueError as a UsageError, which a notebook shows as one sentence."""
    try:
        yield
    except ValueError as mistake:
        raise UsageError(str(mistake)) from mistake


def _parse_one_size(words: Words) -> int:
    try:
        (word,) = words
        return parse_size(word)
    except ValueError:
        raise UsageError(f"say {HOW_MANY}") from None
