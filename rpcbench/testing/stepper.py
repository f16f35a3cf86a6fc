"""The stepper: hold the messages between the members of a world, and deliver them one at a time in any order.

    stepper = Stepper.on()                 # no message is delivered any more, and all clocks stop
    future = rpc.rpc_async("worker1", f)   # as usual, on any member
    stepper.wait()                         # until a message is held
    stepper.deliver()                      # the next one; or deliver(7), drop(7), delay(7)
    stepper.go()                           # deliver all messages; the clocks run again

Guarantees
- While a stepper is on, deadlines, retries and heartbeats of all members stand still, so no call times out while a
  person thinks; `pass_time(2)` advances all clocks by two seconds at once.
- A dropped message is lost as on a bad line: messages of the protocol are retransmitted once time passes, and the
  loss of users' data is reported to the program.
- When the member that made the stepper leaves, every member delivers all messages that it holds.
"""

# Theory of operation
#
#     member of the stepper                              every member
#     Stepper <-> _StepperReports  -- StepCommand (call) ->  StepAgent -+- HeldMessages: a link that holds messages
#                        <---- notice HELD (a Report) --             +- PausableClock: stopped
#
#     a message arrives --> matches the StepCommand?
#                             | no: delivered to the node at once
#                             | yes
#                             v
#                           held --- deliver --> the node handles it, then a Report goes to the stepper
#                                 +- drop -----> lost; its sender may retransmit once the clock moves
#                                 +- go -------> all are delivered, in the order of their arrival
#
# A message is held at its receiver. There its bytes are a copy, so the sender may change the tensor meanwhile; the
# sender gets the same errors as ever; the call that a reply answers is known by name; and when the sender is lost, its
# held messages are handled as the last messages of any lost member. To the protocol a held message is a slow one.
# Commands and notices of the stepper are not messages of the program, so no stepper holds them.
# Notices may overtake each other. So each report has a `turn`, and the stepper ignores a report with a turn lower than
# that of the last one from its member, and one that names another stepper.

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from rpcbench.base.conditions import Condition, Listeners
from rpcbench.base.errors import RpcError, count_noun
from rpcbench.base.futures import Future
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.runtime.members import GONE, WorkerInfo
from rpcbench.testing.faults import PROGRAM, is_of_program, message_ids
from rpcbench.transport.base import Link
from rpcbench.wire import messages as m
from rpcbench.wire.messages import Message


class HeldMessage(NamedTuple):
    """A message that is held at its receiver."""

    source: int  # id of the sender
    seq: int  # sequence number
    message: Message


class HeldMessages(Link):
    """A link that holds the messages for which `means(source, message)`, and calls `on_held` after each one."""

    lossy = True  # `drop` loses messages without breaking the connection: the protocol has to retransmit

    def __init__(self, means: Callable[[int, Message], bool], on_held: Callable[[], object]) -> None:
        super().__init__()
        self._means = means
        self._on_held = on_held
        self._lock = threading.Lock()  # not held while a message is delivered: the node may run for long
        self._held: dict[int, HeldMessage] = {}  # by key, in the order of arrival
        self._count = 0  # the next key
        self._passes_all = False  # after `deliver_held()`: messages pass, though the link may not be removed yet

    @property
    def messages_by_key(self) -> dict[int, HeldMessage]:
        """Return the held messages by key, in the order of arrival."""
        with self._lock:
            return dict(self._held)

    def handle_incoming(self, source: int, seq: int, message: Message) -> None:
        meant = self._means(source, message)
        with self._lock:
            if held := meant and not self._passes_all:
                self._held[self._count] = HeldMessage(source, seq, message)
                self._count += 1
        if held:
            self._on_held()
        else:
            super().handle_incoming(source, seq, message)

    def release_message(self, key: int, deliver: bool) -> None:
        """Deliver one message, and return once the node has handled it; or lose it. Harmless if it is not held."""
        with self._lock:
            waiting = self._held.pop(key, None)
        if waiting is not None and deliver:
            super().handle_incoming(*waiting)

    def deliver_held(self, source: int | None = None) -> None:
        """Deliver the held messages of member `source` in order; with None, all of them, and hold none any more."""
        with self._lock:
            self._passes_all = self._passes_all or source is None  # a member that is lost meanwhile changes nothing
            going = {key: one for key, one in self._held.items() if source in (None, one.source)}
            self._held = {key: one for key, one in self._held.items() if key not in going}
        for waiting in going.values():
            super().handle_incoming(*waiting)


class PausableClock:
    """A clock that follows another one, without the seconds during which it was stopped."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._offset = 0.0  # seconds that this clock is behind its source
        self._stopped_at: float | None = None  # the time shown while stopped; None while it runs

    def __call__(self) -> float:
        stands = self._stopped_at  # read once: another thread may start the clock
        return self._source() - self._offset if stands is None else stands

    def stop_clock(self) -> None:
        """Stop the clock. Harmless while it is stopped."""
        self._stopped_at = self()

    def advance_clock(self, seconds: float) -> None:
        """Advance the stopped clock by `seconds`."""
        assert self._stopped_at is not None, "only a stopped clock can be advanced"
        self._stopped_at += seconds

    def resume_clock(self) -> None:
        """Run again from the time shown, so that no deadline is jumped over. Harmless while the clock runs."""
        if self._stopped_at is not None:
            self._offset = self._source() - self._stopped_at
            self._stopped_at = None


HELD = "step.held"  # the notice that carries a Report
Report = dict[str, Any]
"""{stepper, turn, rows}: the report with the higher turn is the later one; see `StepAgent.make_report`. Rows None:
over."""


@dataclass(frozen=True, slots=True)
class StepCommand:
    """The request to hold messages of some kinds, sent or received by some members, for one stepper."""

    stepper: str  # id of the stepper, "member.number": unique in the world
    kinds: frozenset[str]
    members: frozenset[int]  # empty: all


class StepAgent:
    """The part of each member that holds messages and stops the clock on request of a stepper."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # held by `hold_messages`, which a stepper may call twice at once; taken before `_lock`
        self._holding = threading.Lock()
        self._lock = threading.RLock()  # guards the fields below; not held while messages are delivered
        self._command: StepCommand | None = None  # the current command; None while no stepper is on
        self._controller = -1  # id of the member with the stepper
        self._link: HeldMessages | None = None
        self._clock: PausableClock | None = None  # stays in place after the first stepper, as deadlines refer to it
        self._patience = 0.0  # the watchdog's own patience, in seconds, while it is replaced by 0
        self._turn = 0  # counts reports
        self._report_scheduled = False  # a report is scheduled and has not read the held messages yet
        agent.on_member(self._member_changed)

    # -- requests of the stepper
    def hold_messages(self, controller: int, order: StepCommand) -> Report:
        """Begin to hold messages; deliver those of an earlier stepper, and notify that stepper. Idempotent."""
        with self._holding:
            return self.make_report() if self._command == order else self._replace_command(controller, order)

    def _replace_command(self, controller: int, order: StepCommand) -> Report:
        before, over = self._controller, self._command
        self.stop_holding()
        if over is not None:
            self._agent.notify(before, HELD, {"stepper": over.stepper, "turn": self._turn, "rows": None})
        with self._lock:
            self._controller, self._command = controller, order
            self._link = HeldMessages(self._is_meant, self._report_soon)
            if self._clock is None:
                self._clock = PausableClock(self._agent.links.interceptors.clock)
            self._clock.stop_clock()
            self._patience = self._swap_patience(0.0)  # waits for a person are no stalls: the log stays free of them
            self._agent.links.interceptors.replace_clock(self._clock)
            self._agent.links.interceptors.add_link(self._link)
        return self.make_report()

    def release_message(self, key: int, deliver: bool) -> Report:
        if self._link is not None:
            self._link.release_message(key, deliver)
        return self.make_report()

    def advance_clock(self, seconds: float) -> Report:
        """Advance the clock by `seconds`."""
        with self._lock:
            if self._clock is not None and self._link is not None:
                self._clock.advance_clock(seconds)
                self._agent.links.interceptors.replace_clock(self._clock)  # the same one: deadlines are read anew
        return self.make_report()

    def stop_holding(self, stepper: str | None = None) -> None:
        """Deliver all held messages and start the clock. Harmless if stepper `stepper` (None: any) holds none here."""
        with self._lock:
            if self._link is None or stepper not in (None, self._command and self._command.stepper):
                return  # another stepper has taken over meanwhile: it keeps its messages
            assert self._clock is not None  # made with the first link
            link, self._link, self._command = self._link, None, None
            self._clock.resume_clock()
            self._swap_patience(self._patience)
            self._agent.links.interceptors.replace_clock(self._clock)
        link.deliver_held()  # while the link is still connected to the node
        self._agent.links.interceptors.remove_link(link)

    def _swap_patience(self, seconds: float) -> float:
        """Set after how long the watchdog logs a wait, and return the value before."""
        watchdog = self._agent.part(Watchdog)
        before, watchdog.patience = watchdog.patience, seconds
        return before

    # -- reports to the stepper
    def make_report(self) -> Report:
        """Return the held messages: rows of key, sender, kind, label and ids."""
        with self._lock:
            self._turn += 1
            turn, stepper = self._turn, self._command.stepper if self._command else ""
            held = self._link.messages_by_key if self._link is not None else {}
        rows = [
            [key, source, type(message).__name__, self._label_of_message(message), message_ids(message)]
            for key, (source, _, message) in held.items()
        ]
        return {"stepper": stepper, "turn": turn, "rows": rows}

    def _label_of_message(self, message: Message) -> str:
        """Return the name of the function that the message belongs to."""
        if isinstance(message, m.Result | m.Failure):  # a reply has no label: its call here has
            call = self._agent.machine.read_node(lambda node: node.calls.outgoing.get(message.call))
            return call.label if call else ""
        return getattr(message, "label", "to_here" if isinstance(message, m.Fetch) else "")

    def _is_meant(self, source: int, message: m.Message) -> bool:
        order = self._command
        if order is None or source == self._agent.id or type(message).__name__ not in order.kinds:
            return False
        return is_of_program(message) and (not order.members or not order.members.isdisjoint((source, self._agent.id)))

    def _report_soon(self) -> None:
        """Send a report from a pool thread. Messages that arrive together share one report."""
        with self._lock:
            telling, self._report_scheduled = self._report_scheduled, True
        if not telling:
            self._agent.submit(self._report_held)

    def _report_held(self) -> None:
        with self._lock:
            self._report_scheduled = False
            controller = self._controller
        self._agent.notify(controller, HELD, self.make_report())

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        if kind not in GONE:
            return
        if who.id == self._controller:
            self.stop_holding()  # no stepper is left that could deliver these messages
        elif (link := self._link) is not None:
            link.deliver_held(who.id)  # harmless: a node that has removed the member ignores its messages
            self._report_soon()


def call_step_agent(deed: Callable[..., Any], *args: Any) -> Any:
    """Call a method of this member's StepAgent. Called on each member by the stepper."""
    return deed(current.current_agent().part(StepAgent), *args)


_LINES = 20  # messages that `str(stepper)` lists
_STRIDE = 0.5  # seconds by which `pass_time` advances the clocks at once


class Held(NamedTuple):
    """A held message, as the stepper shows it."""

    n: int  # its number in the stepper
    sender: str  # names of members
    to: str
    kind: str
    label: str  # the name of the function, or ""
    ids: dict[str, str]  # of the RRef, fork, context or call; see `message_ids`

    def __str__(self) -> str:
        about = "  ".join(f"{name} {value}" for name, value in self.ids.items())
        return f"{self.n:>3}  {self.sender} → {self.to}  {' '.join(filter(None, (self.kind, self.label)))}  {about}"


class Stepper:
    """A stepper of one world, made by `on`. Only one of a world is on at a time.

    In a notebook it is displayed as a panel with buttons. `delivered`, which has those that its end has released,
    and `dropped` count messages that were held; `cell` is the handle of a `%%step` cell.
    """

    def __init__(self, agent: Agent, order: StepCommand) -> None:
        self.delivered = self.dropped = 0
        self.passed = 0.0  # seconds by which `pass_time` has advanced the clocks
        self.cell: Any = None
        self._agent = agent
        self._command = order
        self._lock = threading.Lock()  # guards `_rows`, `_turns` and the counts; not held during calls
        self._changes = Condition()  # wakes `wait`
        self._listeners = Listeners()  # panels
        self._numbers = itertools.count(1)
        self._turns: dict[int, int] = {}  # by member: the turn of its latest report
        self._rows: dict[int, tuple[int, int, Held]] = {}  # by number, the next first: member, key there, row
        self._on = True

    @classmethod
    def on(cls, kinds: Iterable[str] = PROGRAM, members: Iterable[str | int] = (), agent: Agent | None = None) -> Self:
        """Begin to hold messages. Those that another stepper of this world holds are delivered.

        Args:
            kinds: Names of the kinds of messages to hold, keys of `PROGRAM`.
            members: Names or ids of members; messages sent or received by one of them are held. Empty: all members.
            agent: The member that controls the stepper; by default the current one.

        Raises:
            ValueError: A kind is unknown.
        """
        agent, kinds = agent or current.current_agent(), frozenset(kinds)
        if unknown := kinds - PROGRAM.keys():
            there = ", ".join(PROGRAM)
            raise ValueError(f"unknown kind of message: {', '.join(sorted(unknown))}; use some of: {there}")
        dispatcher = agent.part(_StepperReports)
        order = StepCommand(
            f"{agent.id}.{next(dispatcher.numbers)}", kinds, frozenset(agent.member(one).id for one in members)
        )
        stepper = cls(agent, order)
        dispatcher.begin_stepper(stepper)
        return stepper

    @classmethod
    def present(cls, agent: Agent) -> Stepper | None:
        """Return the stepper of an agent's world that is on, if that agent made it."""
        found = agent.part(_StepperReports).stepper
        return found if found is not None and found.is_on else None

    # -- held messages
    @property
    def is_on(self) -> bool:
        return self._on

    @property
    def held(self) -> list[Held]:
        """The held messages, the next one first."""
        with self._lock:
            return [row for _, _, row in self._rows.values()]

    def count_held_calls(self) -> Counter[str]:
        """For the runtime: return how many calls of this process wait for a held message, by the worker's name."""
        own = self._agent.name
        pairs = {(row.to if row.sender == own else row.sender, row.ids.get("call")) for row in self.held
                 if own in (row.sender, row.to)}  # fmt: skip
        return Counter(worker for worker, call in pairs if call is not None)

    def wait(self, count: int = 1, timeout: float = 20.0, kind: str | None = None) -> list[Held]:
        """Wait until `count` messages are held, and return all that are held.

        Args:
            count: The number of messages to wait for.
            timeout: Seconds.
            kind: Count and return only messages of this kind.

        Raises:
            RpcError: Fewer messages are held after `timeout` seconds, or the stepper has ended.
        """

        def held_of_kind() -> list[Held]:
            return [row for row in self.held if kind in (None, row.kind)]

        self._changes.wait_for(lambda: len(held_of_kind()) >= count or not self._on, timeout)
        if len(found := held_of_kind()) < count:
            what = count_noun(count, kind or "message")
            raise RpcError(f"waited {timeout:g} s for {what} to be held; there are:\n{self}")
        return found

    # -- actions
    def deliver(self, n: int | None = None) -> Held | None:
        """Deliver the next message, or that with number `n`. The receiver's node has handled it when this returns.

        Returns the message, or None if no message is held. Raises ValueError if none has that number.
        """
        return self._deliver_or_lose(n, deliver=True)

    def drop(self, n: int | None = None) -> Held | None:
        """Lose the next message, or that with number `n`. Returns and raises as `deliver`."""
        return self._deliver_or_lose(n, deliver=False)

    def delay(self, n: int | None = None) -> Held | None:
        """Move the next message, or that with number `n`, behind all others that are held. As `deliver`."""
        with self._lock:
            n = self._resolve_number(n)
            if n is None:
                return None
            self._rows[n] = moved = self._rows.pop(n)  # a dict keeps the order of insertion: now it is the last
        self._notify_listeners()
        return moved[2]

    def pass_time(self, seconds: float) -> None:
        """Advance the clocks of all members by `seconds`, for deadlines and retries."""
        # In strides: each retry sets the time of the next one, so one long stride would cause a single retry.
        while self._on and seconds > 0:
            stride = min(seconds, _STRIDE)
            self._call_all_members(StepAgent.advance_clock, stride)
            self.passed += stride
            seconds -= stride
            self._notify_listeners()

    def go(self) -> None:
        """Deliver all messages, hold none any more, and start the clocks again. Idempotent."""
        if self._on:
            self._on = False  # first: reports that arrive from now on are ignored
            self._call_all_members(StepAgent.stop_holding, self._command.stepper)
            self.stepper_ended()

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake`, from any thread, after each change, until the returned function is called."""
        return self._listeners.add_callback(wake)

    def submit(self, job: Callable[[], object]) -> None:
        """For the runtime: run `job` on a pool thread."""
        self._agent.submit(job)

    # -- called by `_StepperReports`
    def member_joined(self, member: int) -> None:
        """For the runtime: hold the messages that arrive at `member`, too."""
        self.report_received(
            member, self._call_member(member, StepAgent.hold_messages, self._agent.id, self._command).wait()
        )
        if not self._on:  # released meanwhile: `go` may have told the member before it held messages
            self._call_member(member, StepAgent.stop_holding, self._command.stepper).wait()

    def report_received(self, member: int, report: Report) -> None:
        """For the runtime: replace the rows of a member by those of its report. Reports may arrive in any order."""
        if not self._on or report["stepper"] != self._command.stepper:
            return
        if report["rows"] is None:
            self.stepper_ended()  # a stepper of another member has taken over
            return
        names = self._agent.links.members.member_name
        with self._lock:
            if report["turn"] <= self._turns.get(member, -1):
                return  # a later report has been applied
            self._turns[member] = report["turn"]
            known = {key for where, key, _ in self._rows.values() if where == member}
            rows = {row[0]: row for row in report["rows"]}
            self._rows = {n: one for n, one in self._rows.items() if one[0] != member or one[1] in rows}
            for key, source, kind, label, about in rows.values():
                if key not in known:  # others keep their number and place, as `delay` may have moved them
                    n = next(self._numbers)
                    self._rows[n] = member, key, Held(n, names(source), names(member), kind, label, about)
        self._notify_listeners()

    def member_lost(self, member: int) -> None:
        """For the runtime: forget a member that has left, and the messages that it held."""
        with self._lock:
            self._turns.pop(member, None)
            self._rows = {n: row for n, row in self._rows.items() if row[0] != member}
        self._notify_listeners()

    def stepper_ended(self) -> None:
        self._on = False
        with self._lock:
            self.delivered += len(self._rows)  # every member delivers what it holds
            self._rows.clear()
        self._notify_listeners()

    # -- inside
    def _deliver_or_lose(self, n: int | None, deliver: bool) -> Held | None:
        with self._lock:
            n = self._resolve_number(n)
            if n is None:
                return None
            member, key, row = self._rows.pop(n)  # before the call: a second click takes the message after it
            self.delivered += deliver
            self.dropped += not deliver
        self._notify_listeners()
        self.report_received(member, self._call_member(member, StepAgent.release_message, key, deliver).wait())
        return row

    def _resolve_number(self, n: int | None) -> int | None:
        """Return `n` if such a message is held, or with None the number of the next; None if none is held."""
        if n is not None and n not in self._rows:
            raise ValueError(f"no message {n} is held; there are: {', '.join(map(str, self._rows)) or 'none'}")
        return next(iter(self._rows), None) if n is None else n

    def _call_member(self, member: int, deed: Callable[..., Any], *args: Any) -> Future[Any]:
        # No limit: the clocks stand still.
        return self._agent.call(
            member, call_step_agent, (deed, *args), timeout=0, label="a deed of the stepper", own=True
        )

    def _call_all_members(self, deed: Callable[..., Any], *args: Any) -> None:
        """Call a method of the StepAgent of every member, and wait for all."""
        futures = (
            [self._call_member(info.id, deed, *args) for info in self._agent.members()] if self._agent.running else []
        )
        for future in futures:
            with contextlib.suppress(RpcError):  # a member that is lost meanwhile has ended its own part
                future.wait()

    def _notify_listeners(self) -> None:
        self._changes.notify_all()
        self._listeners.notify_listeners()

    def __repr__(self) -> str:
        count = len(self.held)
        state = f"{count_noun(count, 'message')} held" if self._on else "off, no message is held"
        return f"<stepper: {state}; {self.delivered} delivered, {self.dropped} dropped>"

    def _ipython_display_(self) -> None:
        """Show the step panel in a notebook."""
        from IPython.display import display  # here: IPython is needed in notebooks only

        from rpcbench.panels.step import StepPanel

        made = StepPanel(self)
        made.follow_cluster(self._agent)
        display(made)  # type: ignore[no-untyped-call]

    def __str__(self) -> str:
        held = self.held
        more = [f"… and {len(held) - _LINES} more"] if len(held) > _LINES else []
        return "\n".join([repr(self)[1:-1], *map(str, held[:_LINES]), *more])


class _StepperReports:
    """The dispatcher of reports and changes of membership to the stepper of this member that is on."""

    def __init__(self, agent: Agent) -> None:
        self.numbers = itertools.count(1)  # for ids of steppers
        self._agent = agent
        self.stepper: Stepper | None = None  # the latest; it may be off
        agent.on_notice(HELD, self._report_received)
        agent.on_member(self._member_changed)
        agent.hooks.on_end.append(self._agent_stopped)

    def begin_stepper(self, stepper: Stepper) -> None:
        if self.stepper is not None:
            self.stepper.go()
        self.stepper = stepper
        try:
            for info in self._agent.members():
                stepper.member_joined(info.id)
        except BaseException:  # Ctrl-C, too: no member may keep its messages and a stopped clock
            stepper.go()
            raise

    def _report_received(self, source: int, report: Report) -> None:
        if self.stepper is not None:
            self.stepper.report_received(source, report)

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        stepper = self.stepper
        if stepper is None or not stepper.is_on:
            return
        if kind in GONE:
            stepper.member_lost(who.id)
        elif kind == "joined":
            with contextlib.suppress(RpcError):  # it has left again
                stepper.member_joined(who.id)

    def _agent_stopped(self) -> None:
        if self.stepper is not None:
            self.stepper.stepper_ended()
