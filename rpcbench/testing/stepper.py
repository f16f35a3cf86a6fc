"""Hold the messages between the members of a world, and let them go one by one, in whatever order.

    stepper = Stepper.on()                 # nothing arrives any more, and no clock moves
    future = rpc.rpc_async("worker1", f)   # as usual, on whatever member
    stepper.wait()                         # until something is held
    stepper.deliver()                      # the next; or deliver(7), drop(7), delay(7)
    stepper.go()                           # all goes on, and so does time

While it is on, deadlines, retries and heartbeats stand still on all members, so nothing times out while a person
thinks; `pass_time(2)` lets two seconds pass at once. A message that is dropped is lost as on a bad line: one of the
protocol's own goes again once time passes, users' data is told of as lost.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

from rpcbench.base.conditions import Changes, Listeners
from rpcbench.base.errors import RpcError, counted
from rpcbench.base.futures import Future
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.testing.program import PROGRAM
from rpcbench.testing.station import HELD, Order, Report, Station, at

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

    def __init__(self, agent: Agent, order: Order) -> None:
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
        order = Order(f"{agent.id}.{next(desk.numbers)}", kinds, frozenset(agent.member(one).id for one in members))
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
        return self._do(n, Station.deliver)

    def drop(self, n: int | None = None) -> Held | None:
        """Lose the next one, or that with number `n`. As `deliver`."""
        return self._do(n, Station.drop)

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
            self._everywhere(Station.put_on, min(seconds, _STRIDE))
            seconds -= _STRIDE

    def go(self) -> None:
        """Let all go on, also what comes; clocks go again. Harmless if that is so already."""
        if self._on:
            self._on = False
            self._everywhere(Station.end, self._order.stepper)
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
        self._heard(member, self._ask(member, Station.hold, self._agent.id, self._order).wait())

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
            self.delivered += deed is Station.deliver
            self.dropped += deed is Station.drop
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
