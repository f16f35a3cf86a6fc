"""A job that was started elsewhere, seen through torch's debug server: `rpcbench.attach`, `%cluster attach`.

Guarantees
- It is read only: nothing runs in the job but what its debug server offers, and nothing of the job runs here.
- A rank that does not answer is named, with its reason, and the others are shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rpcbench.base.errors import count_noun
from rpcbench.distributed.flight_dumps import FlightDump, name_of_rank, parse_dump
from rpcbench.launch.stacks import DumpedThread, StackReport
from rpcbench.launch.stacks import parse_dump as parse_threads
from rpcbench.telemetry.debug_pages import DebugServer, RankAnswer
from rpcbench.telemetry.profile_files import TracedProfile, join_traces
from rpcbench.telemetry.torch_traces import RankTrace, parse_text
from rpcbench.telemetry.trace import CollectiveTimeline, dumped_world
from rpcbench.telemetry.views import World

_STACKS, _PROFILE = "/stacks", "/profile"
MOST_SECONDS = 45.0
_TORCH = "/site-packages/torch/"
_FROZEN = "<frozen "  # modules of Python itself: imports
_RECORDERS = "/fr_trace_json", "/fr_trace_nccl_json"  # of operations of CPUs, and of NCCL


class AttachedJob:
    """A job with torch's debug server. Its ranks can be looked at; they run no cells and no calls.

    Attributes:
        ranks: Names of the ranks, `rank 0` and so on.
        hosts: The host of each rank.
        address: `host:port` of rank 0's debug server.
    """

    def __init__(self, address: str) -> None:
        self._server = DebugServer.at_address(address)
        self.address = str(self._server)
        answers = self.read_stacks()
        self.ranks = [name_of_rank(answer.rank) for answer in answers]
        self.hosts = [answer.host for answer in answers]

    def stack(self, *ranks: str | int) -> StackReport:
        """Report the lines of the program that the threads of each rank run now, innermost first.

        Also of ranks that hang in a collective or in C code.

        Args:
            ranks: Numbers of ranks, by default all.
        """
        chosen = self._parse_ranks(ranks)
        return StackReport("\n".join(describe_stack(each) for each in self.read_stacks() if each.rank in chosen))

    def read_stacks(self) -> list[RankAnswer]:
        """Return the answer of each rank on its stacks, as text of faulthandler, or an error."""
        return self._server.fetch_answers(_STACKS)

    def _parse_ranks(self, ranks: Iterable[str | int]) -> set[int]:
        chosen = {str(rank).removeprefix("rank") for rank in ranks if rank != "all"}
        everyone = {name.removeprefix("rank "): number for number, name in enumerate(self.ranks)}
        if unknown := chosen - everyone.keys():
            raise ValueError(f"the job has no rank {', '.join(sorted(unknown))}: it has 0 to {len(self.ranks) - 1}")
        return {everyone[rank] for rank in chosen} or {*everyone.values()}

    def flight_dumps(self) -> list[FlightDump]:
        """Return the contents of each rank's flight recorder. ConnectionError if no rank has one."""
        entries: dict[int, FlightDump] = {}
        errors = []
        for page in _RECORDERS:
            for answer in self._server.fetch_answers(page):
                if answer.error:
                    errors.append(f"{name_of_rank(answer.rank)}: {answer.error}")
                    continue
                dump = parse_dump(answer.text.encode(), f"{name_of_rank(answer.rank)} of {self._server}", answer.rank)
                entries[answer.rank] = _join_dumps(entries.get(answer.rank), dump)
        if not entries:
            raise ConnectionError(f"no rank has sent its flight recorder: {'; '.join(errors)}")
        return [entries[rank] for rank in sorted(entries)]

    def collectives(self, last: int = 50) -> CollectiveTimeline:
        """Return the timeline of the latest collectives: ranks that came last, and those missing in the running one."""
        return CollectiveTimeline.from_world(self.read_world(), last, time.time())

    def profile(self, seconds: float = 1.0) -> TracedProfile:
        """Profile all ranks at once for some seconds, with torch's profiler, and return their profiles on one clock.

        The job goes on meanwhile, a little slower. Ranks that do not answer are in `missing`, with their reasons.

        Args:
            seconds: How long. The server waits a minute for its ranks, which then also write their traces.

        Raises:
            ValueError: That is no time from 0 up to `MOST_SECONDS`.
            ConnectionError: No rank has answered.
        """
        if not 0 < seconds <= MOST_SECONDS:
            raise ValueError(
                f"a profile of {seconds:g} s cannot be made: give more than 0 s, and {MOST_SECONDS:g} s at most"
            )
        answers = self._server.fetch_answers(f"{_PROFILE}?duration={seconds}")
        failed = {name_of_rank(answer.rank): answer.error for answer in answers if answer.error}
        if len(failed) == len(answers):
            raise ConnectionError(f"no rank has sent its profile: {'; '.join(failed.values())}")
        traces = [_parse_profile(answer) for answer in answers if not answer.error]
        return join_traces(traces, failed)

    def read_world(self) -> World:
        """Return the present state as views read it: the collectives of all ranks, and remarks on gaps."""
        return dumped_world(self.flight_dumps(), len(self.ranks))

    def explain(self) -> str:
        """Return which collectives are under way, which ranks are missing there, and the lines that these run."""
        places = {name_of_rank(answer.rank): describe_stack(answer) for answer in self.read_stacks()}
        world = self.read_world()
        timeline = CollectiveTimeline.from_world(world, now=time.time())
        missing = {name for row in timeline.rows.values() if row["state"] == "open" for name in row["missing"]}
        lines = [*timeline.describe_unfinished()] or ["No collective is under way."]
        lines += [places[name] for name in sorted(missing, key=self.ranks.index) if name in places]
        remarks = [row["words"] for member in world.values() for row in member["tables"].get("remarks", {}).values()]
        return "\n".join([*lines, *remarks])

    def __repr__(self) -> str:
        hosts = ", ".join(dict.fromkeys(self.hosts))
        return (
            f"A job of {count_noun(len(self.ranks), 'rank')} on {hosts}, through the debug server at {self._server}, "
            "read only.\n"
            "stack(): the lines of all ranks; collectives(): a timeline; explain(): ranks that are missing, and where; "
            "profile(seconds): operators, kinds of time and the straggler."
        )


def attach(address: str) -> AttachedJob:
    """Attach to a job whose ranks run torch's debug server, which `torch.distributed.debug.start_debug_server` starts.

    Args:
        address: `host:port` of rank 0's debug server, by default port 25999. Through ssh one forwarded port is enough.

    Returns:
        The job, to look at.

    Raises:
        ConnectionError: Nothing answers there, or something else.
        ValueError: The address cannot be read.
    """
    return AttachedJob(address)


def _join_dumps(known: FlightDump | None, dump: FlightDump) -> FlightDump:
    """Return the dumps of two recorders of one rank as one."""
    if known is None:
        return dump
    return FlightDump(dump.rank, dump.source, known.entries + dump.entries, {**known.groups, **dump.groups})


def _parse_profile(answer: RankAnswer) -> RankTrace:
    return parse_text(answer.text, f"the profile of {name_of_rank(answer.rank)}", answer.rank)


def describe_stack(answer: RankAnswer) -> str:
    """Return the lines of the program that the threads of a rank run, or why there are none."""
    head = f"{name_of_rank(answer.rank)} ({answer.host})"
    if answer.error:
        return f"{head} did not answer its debug server: {answer.error}"
    return "\n".join([f"{head}:", *_thread_lines(answer.text)])


def find_place(text: str) -> str:
    """Return the innermost line of the program that the main thread of a rank runs; "" if it is in no program."""
    lines = [line for thread in parse_threads(text) if thread.name == "MainThread" for line in _own_lines(thread)]
    return next(iter(lines), "")


def _thread_lines(text: str) -> Iterator[str]:
    for thread in parse_threads(text):
        yield f"  {thread.name}"
        yield from (f"      {line}" for line in _own_lines(thread))


def _own_lines(thread: DumpedThread) -> list[str]:
    own = tuple(frame for frame in thread.frames if _TORCH not in frame.file and not frame.file.startswith(_FROZEN))
    return DumpedThread(thread.name, own or thread.frames).report_lines("", "")
