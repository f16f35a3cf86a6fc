"""What `%cluster` does: start, look at, change and stop the workers of a notebook. Each answers what to say or show.

Clusters that were started here are stopped by `stop`, by unloading the extension, and at exit; those that were joined
are left. Several may run side by side, each under a name; one is the current one, which all magics mean, and
`rpcbench.cluster()`.

`ClusterSummary` says how the clusters of a notebook stand, as a small dict, for the sidebar. Nothing is asked of the
workers. Figures are rounded, so that what stands still does not look changed. What is said of workers is worded the
same in both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from IPython.core.error import UsageError
from IPython.display import DisplayHandle

from rpcbench.base.errors import counted, nearest
from rpcbench.cells.client import Rerun
from rpcbench.cells.targets import Targets
from rpcbench.launch import process, status
from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.launch.cluster import Cluster, Progress, cluster
from rpcbench.launch.registry import KINDS, launcher_names
from rpcbench.launch.status import Looks, WorkerStatus

NONE_RUNS = "No cluster runs. %cluster start 2 starts two workers."


def restarted(names: list[str]) -> str:
    return f"Started again: {', '.join(names)}. What {'it' if len(names) == 1 else 'they'} held is lost."


def interrupted(names: list[str]) -> str:
    return f"Interrupted: {', '.join(names)}."


def sentence(found: BaseCluster) -> str:
    names = found.workers
    return f"{counted(len(names), 'worker')}: {', '.join(names)}."


def sentence_of_replay(name: str, cells: list[Rerun]) -> str:
    """How a worker has done with what it ran again: one line, and one for each cell that failed."""
    failed = [cell for cell in cells if cell.error is not None]
    if not cells:
        return f"{name} had run no cell."
    if not failed:
        return f"{name} has run its {counted(len(cells), 'cell')} again."
    lines = [f"  {_first_line(cell.code)}  ->  {type(cell.error).__name__}: {cell.error}" for cell in failed]
    return "\n".join([f"{name} has run its {counted(len(cells), 'cell')} again; {len(failed)} failed:", *lines])


def _first_line(code: str) -> str:
    first, *rest = code.strip().splitlines() or [""]
    return f"{first[:60]} …" if rest or len(first) > 60 else first


ClusterState = dict[str, Any]


class ClusterSummary:
    """Looks at clusters again and again: a worker's share of a core is that since the last look."""

    def __init__(self) -> None:
        self._looks = Looks(memory=False)

    def at(self, clusters: Mapping[str, BaseCluster], current: BaseCluster | None) -> list[ClusterState]:
        """One dict for each cluster, by name."""
        return [
            {"name": name, "kind": one.kind, "current": one is current, "workers": self._workers(one)}
            for name, one in clusters.items()
        ]

    def _workers(self, one: BaseCluster) -> list[ClusterState]:
        serving = {*one.workers}
        return [worker(row, row.name in serving) for row in self._looks.at(one.watched())]


def worker(row: WorkerStatus, serves: bool) -> ClusterState:
    """One worker. `state`: ready, busy (calls from here wait for it), starting, stopped or lost; `note`: how it was
    lost; `start`: 1 for the first of its name, 2 once it has been started again; `cpu`: per cent of a core, 0
    where that is not known."""
    note = "" if row.state in ("serves", "stopped") else row.state
    state = "lost" if note else row.state if row.state == "stopped" else _serving(row, serves)
    return {
        "name": row.name,
        "state": state,
        "note": note,
        "start": row.incarnation + 1,
        "cpu": round(100 * (row.cpu or 0)),
        "calls": row.calls,
    }


def _serving(row: WorkerStatus, serves: bool) -> str:
    return "starting" if not serves else "busy" if row.calls else "ready"


_WIDTH = 20


class Starting:
    """Shown when it is made; call it with how many serve, and of how many."""

    def __init__(self, of: int) -> None:
        self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
        self._told = 0
        self._handle.display(_bundle(0, of), raw=True)  # type: ignore[no-untyped-call]

    def __call__(self, serve: int, of: int) -> None:
        if serve != self._told:
            self._told = serve
            self._handle.update(_bundle(serve, of), raw=True)  # type: ignore[no-untyped-call]


def _bundle(serve: int, of: int) -> dict[str, str]:
    full = _WIDTH * serve // of
    return {"text/plain": f"{'█' * full}{'░' * (_WIDTH - full)} {serve} of {of} workers serve"}


Words = list[str]
Way = dict[str, Any]
_WHICH_KIND = f"say which kind of workers to start, {' or '.join(KINDS)}: %cluster start 2 --kind kernel"
_WHICH_GRACE = "say how many seconds workers have to end when they are stopped: %cluster start 2 --grace 10"
_WHICH_LAUNCHER = "say what launches the workers, {}: %cluster start 2 --launcher command"
MAIN = "main"
OPTIONS = {
    "start": ("--kind", "--launcher", "--name", "--address", "--grace"),
    "join": ("--name",),
    "restart": ("--replay",),
}
"""What begins with two dashes, by action."""
_OTHERWISE = {"process": ("local",)}
"""Kinds by other names."""


class Voice(NamedTuple):
    """How a start is told of while it lasts: `progress(of)` is called as `Cluster`'s is, `warn` with what lacks."""

    progress: Callable[[int], Progress]
    warn: Callable[[str], object]


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()  # above what follows


IN_CELL = Voice(Starting, _to_stderr)


class Commands:
    """`bind(cluster)` makes a cluster known to the notebook under its name."""

    def __init__(self, targets: Targets, bind: Callable[[BaseCluster], object]) -> None:
        self.named: dict[str, BaseCluster] = {}
        self.started: list[BaseCluster] = []
        self._targets = targets
        self._bind = bind
        self.by_name: dict[str, Callable[[Words], Any]] = {
            "start": self._start,
            "join": self._join,
            "list": self._list,
            "use": self._use,
            "status": self._status,
            "scale": self._scale,
            "restart": self._restart,
            "reload": self._reload,
            "interrupt": self._interrupt,
            "logs": self._logs,
            "group": self._group,
            "stop": self._stop,
        }

    def run(self, action: str, words: Words) -> Any:
        """What an action answers. UsageError for an action or option that there is not."""
        if action not in self.by_name:
            raise UsageError(f"%cluster {action}: {nearest(action, self.by_name)}, as in %cluster start 2")
        return self.by_name[action](_plain(action, words))

    def _start(self, words: Words) -> str:
        words, name = _option(words, "--name", "say what to call it: %cluster start 2 --name other")
        words, kind = _option(words, "--kind", _WHICH_KIND)
        if kind not in (None, *KINDS):
            raise UsageError(_WHICH_KIND)
        words, grace = _option(words, "--grace", _WHICH_GRACE)
        way: Way = ({} if kind is None else {"kind": kind}) | ({} if grace is None else {"grace": _seconds(grace)})
        if "--launcher" in words:
            words, more = _launched(words)
            way |= more
        return self.start(_number(words, "say how many workers to start: %cluster start 2"), way, name)

    def start(self, size: int, way: Way | None = None, name: str | None = None, voice: Voice = IN_CELL) -> str:
        """Start so many, unless they run; the cluster is the current one then. `way`: arguments of `Cluster`."""
        self._adopt()
        found = running() if name is None else self.named.get(name)
        if found is None:
            found = self.named[name or MAIN] = self._make(size, way or {}, voice)
        elif (asked := _kind_asked(way)) and asked not in (found.kind, *_OTHERWISE.get(found.kind, ())):
            raise UsageError(
                f"workers of kind {found.kind} run here: %cluster stop them first, or have those of {asked} beside "
                "them: --name other"
            )
        elif len(found.workers) != size:
            return f"{sentence(found)} %cluster scale {size} makes it {size}."
        return f"{self._take(found)} %%remote {found.workers[0]} runs a cell there, %cluster stop ends it."

    def _make(self, size: int, way: Way, voice: Voice) -> BaseCluster:
        warn_of_room(size, way.get("launcher") or way.get("kind", "process"), voice.warn)
        try:
            self.started.append(Cluster(size, **way, progress=voice.progress(size)))
        except ValueError as mistake:
            raise UsageError(str(mistake)) from mistake
        return self.started[-1]

    def _join(self, words: Words) -> str:
        words, name = _option(words, "--name", "say what to call them: %cluster join tcp://HOST:PORT --name other")
        if len(words) != 1:
            raise UsageError("say where the workers are: %cluster join tcp://HOST:PORT, as they show when they start")
        self._adopt()
        name = name or MAIN
        if name in self.named:
            raise UsageError(f"{name} is a cluster already: %cluster stop first, or give a name: --name other")
        try:
            found = self.named[name] = Cluster.join(words[0])
        except ValueError as mistake:
            raise UsageError(str(mistake)) from mistake
        self.started.append(found)
        return f"{self._take(found)} %%remote {found.workers[0]} runs a cell there, %cluster stop leaves them."

    def _take(self, found: BaseCluster) -> str:
        """Make it the current one."""
        found.prefer()
        self._bind(found)
        return sentence(found)

    def present(self) -> dict[str, BaseCluster]:
        """The clusters that run, by name; the current one among them, even if it was made elsewhere."""
        there = {name: one for name, one in list(self.named.items()) if one.agent.running}
        found = running()
        if found is not None and found not in there.values():
            there[MAIN if MAIN not in there else f"cluster{len(there) + 1}"] = found
        return there

    def _adopt(self) -> None:
        """Forget clusters that have ended, and give the current one a name if it was made elsewhere."""
        for one in self.started:
            if one.over:
                one.shutdown()
        self.named = self.present()
        self.started = [one for one in self.started if one.agent.running]

    def _list(self, words: Words) -> str:
        _nothing(words, "list")
        self._adopt()
        current = running()
        marks = {name: "*" if one is current else " " for name, one in self.named.items()}
        return "\n".join(f"{marks[name]} {name}: {sentence(one)}" for name, one in self.named.items()) or NONE_RUNS

    def _use(self, words: Words) -> str:
        self._adopt()
        if len(words) != 1 or words[0] not in self.named:
            raise UsageError(f"say which: %cluster use NAME; there are {', '.join(self.named) or 'none'}")
        return f"{words[0]}: {self._take(self.named[words[0]])}"

    def _status(self, words: Words) -> Any:
        _nothing(words, "status")
        found = running()
        return NONE_RUNS if found is None else found.status()

    def _scale(self, words: Words) -> str:
        return self.scale(_number(words, "say how many workers there shall be: %cluster scale 3"))

    def scale(self, size: int, voice: Voice = IN_CELL) -> str:
        """Start more workers of the current cluster, or end the last ones."""
        found = cluster()
        if size > len(found.workers):
            warn_of_room(size, found.kind, voice.warn)
        found.scale(size)
        return sentence(found)

    def _restart(self, words: Words) -> str:
        replay = "--replay" in words
        words = [word for word in words if word != "--replay"]
        if not words:
            raise UsageError("say which: %cluster restart worker2")
        found = cluster()
        there = [row.name for row in found.status()]  # lost ones as well
        names = self._targets.find(words, there)
        again = [sentence_of_replay(name, found.restart(name, replay=replay)) for name in names]
        return "\n".join([f"Started again: {', '.join(names)}.", *again]) if replay else restarted(names)

    def _reload(self, words: Words) -> str:
        if not words:
            raise UsageError("say which modules to load anew: %cluster reload helpers")
        found = cluster()
        found.reload(*words)
        return f"Loaded anew: {', '.join(words)}, here and on {', '.join(found.workers)}."

    def _interrupt(self, words: Words) -> str:
        found = cluster()
        names = self._targets.find(words or ["all"], found.workers)
        for name in names:
            found.interrupt(name)
        return interrupted(names)

    def _logs(self, words: Words) -> str:
        found = cluster()
        names = self._targets.find(words or ["all"], [row.name for row in found.status()])
        logs = {name: found.log(name) or "(nothing outside cells and calls)" for name in names}
        return "\n".join(f"[{name}] {line}" for name, text in logs.items() for line in text.splitlines())

    def _group(self, words: Words) -> str:
        if not words:
            groups = self._targets.groups.items()
            return "\n".join(f"{name}: {' '.join(meant)}" for name, meant in groups) or "No group is saved."
        if len(words) == 1:
            raise UsageError("say who belongs to it: %cluster group trainers worker1 worker2, %cluster group rest [1:]")
        names = self._targets.save(words[0], words[1:], cluster().workers)
        return f"{words[0]}: {', '.join(names)}. %%remote {words[0]} runs a cell there."

    def _stop(self, words: Words) -> str:
        _nothing(words, "stop")
        found = running()
        if found is None:
            return "No cluster runs."
        found.shutdown()
        return self.stopped(found)

    def stopped(self, found: BaseCluster) -> str:
        """One has been: another that runs is the current one then."""
        self._adopt()
        left = running()
        told = found.farewell
        return told if left is None else f"{told} The current one is now: {self._take(left)}"

    def stop_started(self) -> None:
        """Stop the clusters that `start` made, if they still run."""
        for one in self.started:
            one.shutdown()


def running() -> BaseCluster | None:
    try:
        return cluster()
    except RuntimeError:
        return None


def warn_of_room(size: int, kind: str, warn: Callable[[str], object]) -> None:
    """Say before they start what so many workers lack here."""
    for complaint in status.resource_warnings(size, process.default_mode() if kind in ("process", "local") else kind):
        warn(complaint)


def _plain(action: str, words: Words) -> Words:
    """The words, with `--kind=kernel` as `--kind kernel`. UsageError for an option that the action does not take."""
    plain: Words = []
    for word in words:
        option, equals, value = word.partition("=")
        if not option.startswith("--"):
            plain.append(word)
        elif option in OPTIONS.get(action, ()):
            plain += [option, value] if equals else [option]
        else:
            raise UsageError(f"%cluster {action} has no option {option}: {nearest(option, OPTIONS.get(action, ()))}")
    return plain


def _option(words: Words, option: str, complaint: str) -> tuple[Words, str | None]:
    """The words without the option and its value, and that value."""
    if option not in words:
        return words, None
    at = words.index(option)
    if at + 1 == len(words):
        raise UsageError(complaint)
    return [*words[:at], *words[at + 2 :]], words[at + 1]


def _launched(words: Words) -> tuple[Words, Way]:
    """The words without those that say what launches the workers, and those as arguments of `Cluster`."""
    told = _WHICH_LAUNCHER.format(", ".join(launcher_names()))
    words, launcher = _option(words, "--launcher", told)
    if launcher not in launcher_names():
        raise UsageError(told)
    words, address = _option(words, "--address", "say where workers dial this host: --address 192.0.2.7:29500")
    pairs = [word.partition("=") for word in words if "=" in word]
    options = {name: value for name, _, value in pairs}
    return [word for word in words if "=" not in word], {"launcher": launcher, "options": options, "address": address}


def _kind_asked(way: Way | None) -> str | None:
    return (way or {}).get("launcher") or (way or {}).get("kind")


def _seconds(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise UsageError(_WHICH_GRACE) from None


def _number(words: Words, complaint: str) -> int:
    if len(words) != 1 or not words[0].isdecimal() or int(words[0]) < 1:
        raise UsageError(complaint)
    return int(words[0])


def _nothing(words: Words, action: str) -> None:
    if words:
        raise UsageError(f"%cluster {action} takes nothing more, not {' '.join(words)}")
