"""The parsers of the lines of magics: one for each magic that has options. Completion and help read them, too.

Guarantees
- A mistake on a line is a UsageError of one sentence, before anything runs. For an argument with a help text it is
  "say" and that text, which ends with an example.
- Options and other words may come in any order. A list may stand in one option, with commas, or in several.
- The metavar of an argument names the kind of its words, for completion: `WORKER`, `CLUSTER`, …
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from IPython.core.error import UsageError

from rpcbench.base.errors import suggest_nearest
from rpcbench.cells.display import collapsed_areas, stacked_areas
from rpcbench.cells.partition import COMBINATIONS, SCATTER, Dimension
from rpcbench.launch.registry import KINDS, OWN, check_launcher
from rpcbench.notebook.async_cells import tabbed_areas
from rpcbench.testing.faults import PROGRAM

WORKER, CLUSTER, SAVED, LAUNCHER = "WORKER", "CLUSTER", "SIZE|NAME", "LAUNCHER"
VALUES, GPUS, LOADS, FETCHES = "OPTION=VALUE", "0,1", "a,b:scatter", "y,z:cat"
"""Metavars of arguments whose words completion knows."""
HOW_MANY = "how many workers to start: %cluster start 2; or the name of a saved cluster: %cluster start lab"


class MagicParser(argparse.ArgumentParser):
    """A parser of a magic's line."""

    def __init__(self, prog: str, **options: Any) -> None:
        width = functools.partial(argparse.HelpFormatter, width=110)
        super().__init__(prog, add_help=False, exit_on_error=False, formatter_class=width, **options)
        self.actions: dict[str, MagicParser] = {}  # by the first word of the line, for `%cluster`

    @property
    def arguments(self) -> list[argparse.Action]:
        return self._actions

    def add(self, name: str, text: str, **options: Any) -> None:
        """Add an argument with a help text."""
        self.add_argument(name, help=text.replace("%", "%%"), **options)

    def add_list(self, name: str, parse: Callable[[str], Iterable[Any]], metavar: str) -> None:
        """Add an option that takes several values: with commas between, or where it is said again."""
        self.add_argument(name, type=parse, default=[], metavar=metavar, action="extend")

    def add_action(self, name: str, text: str) -> MagicParser:
        """Add a first word, with a help text, and return the parser of the words after it."""
        if self._subparsers is None:
            self._parsers = self.add_subparsers(title="actions", metavar="ACTION", prog=self.prog)
            self.actions = self._parsers.choices
        return self._parsers.add_parser(name, help=text.replace("%", "%%"))

    def action(self, word: str) -> MagicParser:
        """Return the parser of the words after the first one. UsageError if there is no such action."""
        if word not in self.actions:
            raise UsageError(f"{self.prog} {word}: {suggest_nearest(word, self.actions)}, as in %cluster start 2")
        return self.actions[word]

    def parse_some(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the words that this parser does not know."""
        try:
            return self.parse_known_intermixed_args(words)
        except argparse.ArgumentError as mistake:
            name = mistake.argument_name
            raise UsageError(self._request(name) or f"{mistake}; {self.format_usage().strip()}") from None

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options of the whole line."""
        options, rest = self.parse_some(words)
        if not rest:
            return options
        option, *_ = rest[0].split("=")
        if option.startswith("-"):
            known = [name for argument in self.arguments for name in argument.option_strings]
            raise UsageError(f"{self.prog} has no option {option}: {suggest_nearest(option, known)}")
        raise UsageError(self._request(None) or f"{self.prog} takes no arguments; remove {' '.join(rest)}")

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    def _request(self, name: str | None) -> str:
        """Return the request for an argument, or for the first word of the line; empty if it has no help text."""
        for argument in self.arguments:
            names = ["/".join(argument.option_strings)] if argument.option_strings else [None, argument.metavar]
            if name in names and argument.help:
                return f"say {argument.help.replace('%%', '%')}"
        return ""


def cluster_line() -> MagicParser:
    """Return the parser of `%cluster`, with one parser for each action."""
    line = MagicParser(
        "%cluster", usage="%%cluster ACTION …",
        description="Start, inspect, change and stop the workers of this notebook.",
        epilog="%cluster ACTION --help shows the words of an action. The variable `cluster` is the current cluster.",
    )  # fmt: skip
    _add_start(line.add_action("start", "start two workers, unless they run: %cluster start 2"))
    join = line.add_action("join", "join workers that `torchrun … -m rpcbench.worker` has started at an address")
    where = "where the workers are: %cluster join tcp://HOST:PORT, as they show when they start"
    join.add("address", where, metavar="tcp://HOST:PORT")
    join.add("--name", "what to call them: %cluster join tcp://HOST:PORT --name other")
    attach = line.add_action("attach", "look at a job that runs torch's debug server, started elsewhere; read only")
    attach.add("address", "where rank 0's debug server is: %cluster attach node7:25999", metavar="HOST:PORT")
    line.add_action("list", "list the running clusters and their workers")
    use = line.add_action("use", "make another cluster the current one, for all magics: %cluster use main")
    use.add_argument("name", metavar=CLUSTER, nargs="?")
    status = line.add_action("status", "show process, memory, cpu and pending calls of each worker")
    status.add("--json", "as JSON, for scripts: %cluster status --json", action="store_true", dest="as_json")
    scale = line.add_action("scale", "start more workers, or end the last ones: %cluster scale 3")
    scale.add("size", "how many workers there shall be: %cluster scale 3", metavar="SIZE", type=parse_size)
    restart = line.add_action("restart", "end a worker, if it still runs, and start it again under its name")
    restart.add("workers", "which: %cluster restart worker2", metavar=WORKER, nargs="+")
    restart.add("--replay", "run its cells that had no error again, and report those that fail", action="store_true")
    reload = line.add_action("reload", "reload modules from their files, here and on all workers")
    reload.add("modules", "which modules to reload: %cluster reload helpers", metavar="MODULE", nargs="+")
    for name, text in (
        ("interrupt", "interrupt the cells that run on these workers, or on all"),
        ("stack", "show where the threads of workers are: the cell or call that each runs, and its lines"),
        ("logs", "show the last lines that workers wrote outside cells"),
    ):
        line.add_action(name, text).add_argument("workers", metavar=WORKER, nargs="*")
    group = line.add_action("group", "save a name for some workers: %cluster group rest [1:]; or list these names")
    group.add_argument("name", metavar="GROUP", nargs="?")
    group.add_argument("workers", metavar=WORKER, nargs="*")
    stop = line.add_action("stop", "end all workers; of another cluster: %cluster stop other")
    stop.add_argument("name", metavar=CLUSTER, nargs="?")
    return line


def _add_start(start: MagicParser) -> None:
    launchers = "; ".join(f"{name}: {own.text}" for name, own in OWN.items())
    start.epilog = f"Launchers: {launchers}; and those of other packages"
    start.add("size", HOW_MANY, metavar=SAVED, nargs="?")
    start.add("words", "options of the launcher", metavar=VALUES, nargs="*")
    start.add("--name", "what to call it: %cluster start 2 --name other")
    kinds = f"which kind of workers to start, {' or '.join(KINDS)}: %cluster start 2 --kind kernel"
    start.add("--kind", kinds, choices=KINDS)
    names = f"what launches the workers, {', '.join(OWN)}: %cluster start 2 --launcher command"
    start.add("--launcher", names, metavar=LAUNCHER, type=_parse_launcher)
    start.add("--address", "where workers dial this host: --address 192.0.2.7:29500", metavar="HOST:PORT")
    which = "which GPU each worker gets, or none: %cluster start 2 --gpus 0,1"
    start.add("--gpus", which, metavar=GPUS, action=_JoinedList)
    variables = "which variable workers get: %cluster start 2 --env OMP_NUM_THREADS=2 --env DEBUG=1"
    start.add("--env", variables, metavar="NAME=VALUE", action="append", type=_parse_variable)
    python = "which interpreter runs the workers: %cluster start 2 --python /path/of/venv/bin/python"
    start.add("--python", python, metavar="FILE")
    grace = "how many seconds workers have to end when they are stopped (5): %cluster start 2 --grace 10"
    start.add("--grace", grace, metavar="SECONDS", type=float)
    patience = "how many seconds to wait for workers that start (60): %cluster start 2 --patience 300"
    start.add("--patience", patience, metavar="SECONDS", type=float)


class _JoinedList(argparse.Action):
    """A list that stays a text: an option that is said again goes on behind a comma."""

    def __call__(self, parser: object, options: argparse.Namespace, text: Any, name: str | None = None) -> None:
        before = getattr(options, self.dest)
        setattr(options, self.dest, text if before is None else f"{before},{text}")


def parse_size(text: str) -> int:
    """Return a number of workers. ValueError if it is none."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(text)
    return int(text)


def _parse_launcher(text: str) -> str:
    try:
        return check_launcher(text)
    except ValueError as mistake:
        raise UsageError(str(mistake)) from None


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(text)
    return name, value


def remote_line() -> MagicParser:
    line = MagicParser("%%remote")
    line.add_argument("workers", nargs="+", metavar=WORKER)
    line.add_list("-i", lambda text: _parse_transfers(text, [SCATTER]), LOADS)
    line.add_list("-o", lambda text: _parse_transfers(text, COMBINATIONS), FETCHES)
    line.add_list("--rref", _parse_names, "y")
    line.add_argument("--async", dest="later", action="store_true")
    line.add_argument("--timeout", type=_parse_seconds, default=math.inf, metavar="seconds")
    line.add_argument("--local", action="store_true")
    line.add_argument("--label", action="store_true")
    shown = line.add_mutually_exclusive_group()
    shown.set_defaults(areas=stacked_areas)
    shown.add_argument("--collapse", dest="areas", action="store_const", const=collapsed_areas)
    shown.add_argument("--tabs", dest="areas", action="store_const", const=tabbed_areas)
    return line


def profile_line() -> MagicParser:
    """Return the parser of the options that `%%profile` has beside those of `%%remote`."""
    line = MagicParser("%%profile")
    line.add_argument("--save", metavar="file")
    line.add_argument("--memory", action="store_true")
    return line


def step_line() -> MagicParser:
    line = MagicParser("%%step")
    line.add_argument("workers", nargs="*", metavar=WORKER)
    line.add_list("--hold", _parse_kinds, "Call,Result")
    line.add_list("--of", lambda text: text.split(","), "worker1,worker2")
    return line


def _parse_kinds(text: str) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        if kind not in PROGRAM:
            raise UsageError(f"--hold {kind}: {suggest_nearest(kind, PROGRAM)}")
    return kinds


def _parse_names(text: str) -> tuple[str, ...]:
    """Split `a,b` into names of variables."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is not the name of a variable; write names with commas between: a,b")
    return names


class Transfer(NamedTuple):
    """A variable on the line of `%%remote`, as `x`, `x:scatter`, `y:cat` or `y:cat:1`."""

    name: str
    how: str = ""  # empty: whole
    dim: Dimension = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.how}" if self.how else self.name


def _parse_transfers(text: str, ways: Collection[str]) -> tuple[Transfer, ...]:
    """Split `a,x:scatter,y:cat:1` into transfers, each in one of these ways or whole."""
    return tuple(_parse_transfer(word.strip(), ways) for word in text.split(","))


def _parse_transfer(word: str, ways: Collection[str]) -> Transfer:
    name, *rest = word.split(":")
    _parse_names(name)
    if not rest:
        return Transfer(name)
    how, dim, *more = rest if len(rest) > 1 else [*rest, "0"]
    if how not in ways:
        raise UsageError(f"{word}: there is no way {how!r} to transfer a variable here: {suggest_nearest(how, ways)}")
    number = re.fullmatch(r"-?\d+", dim)
    if more or not (number or dim.isidentifier()):
        raise UsageError(f"{word}: after {how} comes at most one dimension, as in {name}:{how}:1")
    return Transfer(name, how, int(dim) if number else dim)


def _parse_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise UsageError(f"--timeout {text}: say a number of seconds, greater than 0")
