"""Hold the messages between the members of a world, and let them go one by one, in whatever order.

    stepper = Stepper.on()                 # nothing arrives any more, and no clock moves
    future = rpc.rpc_async("worker1", f)   # as usual, on whatever member
    stepper.wait()                         # until something is held
    stepper.deliver()                      # the next; or deliver(7), drop(7), delay(7)
    stepper.go()                           # all goes on, and so does time

While it is on, deadlines, retries and heartbeats stand still on all members, so nothing times out while a person
thinks; `pass_time(2)` lets two seconds pass at once. A message that is dropped is lost as on a bad line: one of the
protocol's own goes again once time passes, users' data is told of as lost.

    stepper (this member)  ──StepCommand──►  StepAgent (each member)  holds HeldMessages, and the clock
                           ◄────notice─────  what is held now

A message is held where it arrives. There its bytes are its own, whatever its sender does to a tensor by then; its
sender's errors are what they always are; the call that it answers is known by name; and a member that dies while it is
held is mourned as after any last message. To the protocol a held message is one that takes long. Commands and notices
are not the program's, so nothing holds them up. When the stepper's member goes, all that is held goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from rpcbench.base.conditions import Changes, Listeners
from rpcbench.base.errors import RpcError, counted
from rpcbench.base.futures import Future
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.testing.faults import PROGRAM, message_ids, of_program
from rpcbench.transport.base import Link
from rpcbench.wire import messages as m
from rpcbench.wire.messages import Message


class HeldMessage(NamedTuple):
    """A message that is held, and since when (monotonic seconds)."""

    source: int
    seq: int
    message: Message
    since: float


class HeldMessages(Link):
    """Holds the messages that `means(source, message)`. `told` is called when there are more of them."""

    lossy = True

    def __init__(self, means: Callable[[int, Message], bool], told: Callable[[], object]) -> None:
        super().__init__()
        self._means = means
        self._told = told
        self._lock = threading.Lock()
        self._held: dict[int, HeldMessage] = {}
        self._count = 0
        self._over = False

    @property
    def held(self) -> dict[int, HeldMessage]:
        """By their numbers here, in the order of arrival."""
        with self._lock:
            return dict(self._held)

    def incoming(self, source: int, seq: int, message: Message) -> None:
        if not self._means(source, message):
            super().incoming(source, seq, message)
            return
        with self._lock:
            if not self._over:
                self._held[self._count] = HeldMessage(source, seq, message, time.monotonic())
                self._count += 1
                message = None
        if message is None:
            self._told()
        else:
            super().incoming(source, seq, message)

    def deliver(self, key: int) -> bool:
        """Let one go on; what follows from it has been done when this returns. False if it is not held any more."""
        waiting = self._take(key)
        if waiting is not None:
            super().incoming(waiting.source, waiting.seq, waiting.message)
        return waiting is not None

    def drop(self, key: int) -> bool:
        """Lose one. False if it is not held any more."""
        return self._take(key) is not None

    def let_go(self, source: int | None = None) -> None:
        """Let all go on that is held, in order; or all of one member. Without one, nothing is held any more."""
        with self._lock:
            self._over = source is None
            going = {key: one for key, one in self._held.items() if source in (None, one.source)}
            self._held = {key: one for key, one in self._held.items() if key not in going}
        for waiting in going.values():
            super().incoming(waiting.source, waiting.seq, waiting.message)

    def _take(self, key: int) -> HeldMessage | None:
        with self._lock:
            return self._held.pop(key, None)


class Clock:
    """Counts the seconds of another one, except for those in which it stood still."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._behind = 0.0
        self._stands: float | None = None

    def __call__(self) -> float:
        stands = self._stands
        return self._source() - self._behind if stands is None else stands

    def stop(self) -> None:
        """Harmless while it stands."""
        self._stands = self()

    def put_on(self, seconds: float) -> None:
        """While it stands: so many seconds have passed."""
        assert self._stands is not None, "a clock that runs is not put on by hand"
        self._stands += seconds

    def go(self) -> None:
        """Go on from where it stands. Harmless while it runs."""
        if self._stands is not None:
            self._behind = self._source() - self._stands
            self._stands = None


HELD = "step.held"
Report = dict[str, Any]
"""{stepper, turn, rows}: of two the one with the higher turn is later; see `Station.report`. No rows: it is over."""


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Hold messages of these kinds, to and from these members (empty: all), for the stepper of this name."""

    stepper: str
    kinds: frozenset[str]
    members: frozenset[int]


class StepAgent:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # around changes of what is held by whom; not around deliveries
        self._order: StepCommand | None = None
        self._desk = -1
        self._link: HeldMessages | None = None
        self._clock: Clock | None = None
        self._patience = 0.0
        self._turn = 0
        self._telling = False
        agent.on_member(self._changed)

    # -- what the stepper asks for
    def hold(self, desk: int, order: StepCommand) -> Report:
        """Begin; what another stepper held goes on, and it is told."""
        before, over = self._desk, self._order
        self.end()
        if over is not None:
            self._agent.notify(before, HELD, {"stepper": over.stepper, "turn": self._turn, "rows": None})
        with self._lock:
            self._desk, self._order = desk, order
            self._link = HeldMessages(self._means, self._tell_soon)
            if self._clock is None:
                self._clock = Clock(self._agent.links.clock)
            self._clock.stop()
            self._patience = self._swap_patience(0.0)  # who waits for a person is not told of
            self._agent.links.run_by(self._clock)
            self._agent.links.add(self._link)
        return self.report()

    def deliver(self, key: int) -> Report:
        if self._link is not None:
            self._link.deliver(key)
        return self.report()

    def drop(self, key: int) -> Report:
        if self._link is not None:
            self._link.drop(key)
        return self.report()

    def put_on(self, seconds: float) -> Report:
        """Let so much time pass at once."""
        with self._lock:
            if self._clock is not None and self._link is not None:
                self._clock.put_on(seconds)
                self._agent.links.run_by(self._clock)
        return self.report()

    def end(self, stepper: str | None = None) -> None:
        """All goes on, and time as well. Harmless where this stepper (None: any) holds nothing."""
        with self._lock:
            if self._link is None or self._clock is None or stepper not in (None, self._order and self._order.stepper):
                return
            link, self._link, self._order = self._link, None, None
            self._clock.go()
            self._swap_patience(self._patience)
            self._agent.links.run_by(self._clock)
        link.let_go()
        self._agent.links.remove(link)

    def _swap_patience(self, seconds: float) -> float:
        """Of the one who tells of long waits in the log: what it was before."""
        watchdog = self._agent.part(Watchdog)
        before, watchdog.patience = watchdog.patience, seconds
        return before

    # -- what it is told
    def report(self) -> Report:
        """What is held: rows of key, sender, kind, label, ids, and since when (monotonic seconds)."""
        with self._lock:
            self._turn += 1
            link, stepper = self._link, self._order.stepper if self._order else ""
            held = link.held if link is not None else {}
            turn = self._turn
        return {"stepper": stepper, "turn": turn, "rows": [self._row(key, one) for key, one in held.items()]}

    def _row(self, key: int, one: HeldMessage) -> list[Any]:
        message = one.message
        return [key, one.source, type(message).__name__, self._label(one), message_ids(message), one.since]

    def _label(self, one: HeldMessage) -> str:
        """The name of the function that it is about."""
        message = one.message
        if isinstance(message, m.Result | m.Failure):
            asked = self._agent.machine.ask(lambda node: node.calls.outgoing.get(message.call))
            return asked.label if asked else ""
        return getattr(message, "label", "to_here" if isinstance(message, m.Fetch) else "")

    def _means(self, source: int, message: m.Message) -> bool:
        order = self._order
        if order is None or source == self._agent.id or type(message).__name__ not in order.kinds:
            return False
        return of_program(message) and (not order.members or not order.members.isdisjoint((source, self._agent.id)))

    def _tell_soon(self) -> None:
        """Several that come together are told of together."""
        with self._lock:
            telling, self._telling = self._telling, True
        if not telling:
            self._agent.submit(self._tell)

    def _tell(self) -> None:
        with self._lock:
            self._telling = False
            desk = self._desk
        self._agent.notify(desk, HELD, self.report())

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind not in GONE:
            return
        if who.id == self._desk:
            self.end()
        elif (link := self._link) is not None:
            link.let_go(who.id)  # last words; whoever was told of its end does not hear them
            self._tell_soon()


def at(deed: Callable[..., Any], *args: Any) -> Any:
    """Called on a member: do that at its station."""
    return deed(current.current().part(StepAgent), *args)


_LINES = 20
_STRIDE = 0.5


class Held(NamedTuple):
    """A message that is held, under its number `n`; names of members; the function's name; what it is about."""

    n: int
    sender: str
    to: str
    kind: str
    label: str
    ids: dict[str, str]

    def __str__(self) -> str:
        about = "  ".join(f"{name} {value}" for name, value in self.ids.items())
        return f"{self.n:>3}  {self.sender} → {self.to}  {' '.join(filter(None, (self.kind, self.label)))}  {about}"


class Stepper:
    """Made by `on`. `delivered` and `dropped` count the messages that were; `cell` is the handle of a `%%step` cell.

    One of a world is on at a time. In a notebook it shows itself as a panel, with buttons. What is held when its member
    goes, or ends its world, hangs nowhere: other members go on by themselves.
    """

    def __init__(self, agent: Agent, order: StepCommand) -> None:
        self.delivered = self.dropped = 0
        self.cell: Any = None
        self._agent = agent
        self._order = order
        self._lock = threading.Lock()
        self._changes = Changes()
        self._listeners = Listeners()
        self._numbers = itertools.count(1)
        self._turns: dict[int, int] = {}
        self._rows: dict[int, tuple[int, int, Held]] = {}  # by number, in order: member, its key, what is shown
        self._on = True

    @classmethod
    def on(cls, kinds: Iterable[str] = PROGRAM, members: Iterable[str | int] = (), agent: Agent | None = None) -> Self:
        """Begin to hold messages of these `kinds`, to and from these `members`; of none named, of all.

        What another stepper of this world holds goes on. ValueError for kinds that there are not.
        """
        agent, kinds = agent or current.current(), frozenset(kinds)
        if unknown := kinds - PROGRAM.keys():
            there = ", ".join(PROGRAM)
            raise ValueError(f"no message is called {', '.join(sorted(unknown))}; there are: {there}")
        desk = agent.part(_Desk)
        order = StepCommand(
            f"{agent.id}.{next(desk.numbers)}", kinds, frozenset(agent.member(one).id for one in members)
        )
        stepper = cls(agent, order)
        desk.begin(stepper)
        return stepper

    # -- what is held
    @property
    def is_on(self) -> bool:
        return self._on

    @property
    def held(self) -> list[Held]:
        """What is held, the next one first."""
        with self._lock:
            return [row for _, _, row in self._rows.values()]

    def wait(self, count: int = 1, timeout: float = 20.0, kind: str | None = None) -> list[Held]:
        """Wait until so many messages (of that kind) are held, and return them. RpcError after `timeout` seconds."""

        def there() -> list[Held]:
            return [row for row in self.held if kind in (None, row.kind)]

        self._changes.wait_for(lambda: len(there()) >= count or not self._on, timeout)
        if len(found := there()) < count:
            what = counted(count, kind or "message")
            raise RpcError(f"waited {timeout:g} s for {what} to be held; there are:\n{self}")
        return found

    # -- what to do with it
    def deliver(self, n: int | None = None) -> Held | None:
        """Let the next one go on, or that with number `n`: the tables of its receiver have changed when this returns.

        The message; None where nothing is held. ValueError where there is none with that number.
        """
        return self._do(n, StepAgent.deliver)

    def drop(self, n: int | None = None) -> Held | None:
        """Lose the next one, or that with number `n`. As `deliver`."""
        return self._do(n, StepAgent.drop)

    def delay(self, n: int | None = None) -> Held | None:
        """Put the next one, or that with number `n`, behind all others that are held now."""
        with self._lock:
            n = self._number(n)
            if n is None:
                return None
            self._rows[n] = self._rows.pop(n)
            row = self._rows[n][2]
        self._tell()
        return row

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass at once, for deadlines and retries of all members.

        In strides of half a second, as each retry sets the time of the next.
        """
        while self._on and seconds > 0:
            self._everywhere(StepAgent.put_on, min(seconds, _STRIDE))
            seconds -= _STRIDE

    def go(self) -> None:
        """Let all go on, also what comes; clocks go again. Harmless if that is so already."""
        if self._on:
            self._on = False
            self._everywhere(StepAgent.end, self._order.stepper)
            self.ended()

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake`, from some thread, after each change, until the returned function is called."""
        return self._listeners.add(wake)

    def submit(self, job: Callable[[], object]) -> None:
        """For the runtime: do something on another thread."""
        self._agent.submit(job)

    # -- by the desk
    def began(self, member: int) -> None:
        """For the runtime: hold what comes in at a member, too."""
        self._heard(member, self._ask(member, StepAgent.hold, self._agent.id, self._order).wait())

    def heard(self, member: int, report: Report) -> None:
        if not self._on or report["stepper"] != self._order.stepper:
            return
        if report["rows"] is None:
            self.ended()  # a stepper of another member has taken over
        else:
            self._heard(member, report)

    def lost(self, member: int) -> None:
        """For the runtime: a member is gone, and what it held with it."""
        with self._lock:
            self._turns.pop(member, None)
            self._rows = {n: row for n, row in self._rows.items() if row[0] != member}
        self._tell()

    def ended(self) -> None:
        self._on = False
        with self._lock:
            self._rows.clear()
        self._tell()

    # -- inside
    def _do(self, n: int | None, deed: Callable[..., Report]) -> Held | None:
        with self._lock:
            n = self._number(n)
            if n is None:
                return None
            member, key, row = self._rows.pop(n)
            self.delivered += deed is StepAgent.deliver
            self.dropped += deed is StepAgent.drop
        self._tell()
        self._heard(member, self._ask(member, deed, key).wait())
        return row

    def _number(self, n: int | None) -> int | None:
        """The number that is meant; None for the next one where there is none."""
        if n is not None and n not in self._rows:
            raise ValueError(f"no message {n} is held; there are: {', '.join(map(str, self._rows)) or 'none'}")
        return next(iter(self._rows), None) if n is None else n

    def _heard(self, member: int, report: Report) -> None:
        """What a member holds; words of it may come in any order."""
        names = self._agent.roster.name
        with self._lock:
            if report["turn"] <= self._turns.get(member, -1) or report["stepper"] != self._order.stepper:
                return
            self._turns[member] = report["turn"]
            known = {key for where, key, _ in self._rows.values() if where == member}
            rows = {row[0]: row for row in report["rows"]}
            self._rows = {n: one for n, one in self._rows.items() if one[0] != member or one[1] in rows}
            for key, source, kind, label, about, _ in rows.values():
                if key not in known:
                    n = next(self._numbers)
                    self._rows[n] = member, key, Held(n, names(source), names(member), kind, label, about)
        self._tell()

    def _ask(self, member: int, deed: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._agent.call(member, at, (deed, *args), timeout=0, own=True)

    def _everywhere(self, deed: Callable[..., Any], *args: Any) -> None:
        """A member that is lost meanwhile needs nothing."""
        asked = [self._ask(info.id, deed, *args) for info in self._agent.members()] if self._agent.running else []
        for future in asked:
            with contextlib.suppress(RpcError):
                future.wait()

    def _tell(self) -> None:
        self._changes.tell()
        self._listeners.tell()

    def __repr__(self) -> str:
        count = len(self.held)
        state = f"{counted(count, 'message')} held" if self._on else "nothing is held any more"
        return f"<stepper: {state}; {self.delivered} delivered, {self.dropped} dropped>"

    def _ipython_display_(self) -> None:
        """In a notebook: the step panel."""
        from IPython.display import display

        from rpcbench.panels.step import StepPanel

        display(StepPanel(self))  # type: ignore[no-untyped-call]

    def __str__(self) -> str:
        held = self.held
        more = [f"… and {len(held) - _LINES} more"] if len(held) > _LINES else []
        return "\n".join([repr(self)[1:-1], *map(str, held[:_LINES]), *more])


class _Desk:
    """Hears what all members hold, for the one stepper of this member that is on."""

    def __init__(self, agent: Agent) -> None:
        self.numbers = itertools.count(1)
        self._agent = agent
        self._stepper: Stepper | None = None
        agent.on_notice(HELD, self._heard)
        agent.on_member(self._changed)
        agent.on_end.append(self._ended)

    def begin(self, stepper: Stepper) -> None:
        if self._stepper is not None:
            self._stepper.go()
        self._stepper = stepper
        try:
            for info in self._agent.members():
                stepper.began(info.id)
        except BaseException:
            stepper.go()
            raise

    def _heard(self, source: int, report: Report) -> None:
        if self._stepper is not None:
            self._stepper.heard(source, report)

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        stepper = self._stepper
        if stepper is None or not stepper.is_on:
            return
        if kind in GONE:
            stepper.lost(who.id)
        elif kind == "joined":
            with contextlib.suppress(RpcError):  # it has gone again
                stepper.began(who.id)

    def _ended(self) -> None:
        if self._stepper is not None:
            self._stepper.ended()
