"""Reads connections, each on one thread at a time, which also runs the short calls that they bring.

Who holds the token of a connection reads it. Around a call the token lies on the table, and whoever takes it first
reads on: the same thread once the call has ended; a spare one as soon as the call waits for something of ours that is
not likely to be there soon, or has run for `LONG` seconds. So two never read, and no message waits for a call for
longer than that.

A thread that waits for an answer reads it itself, if it finds the token: that saves a change of threads. Where
it does not, the reader puts the token beside itself once no more answers are due, and stands by: such threads may take
it and return it, and nobody is woken; what comes while nobody has it wakes the one who stands by.

Nobody stands by while a call runs on the reader. So the monitor gives a token that has lain for `LONG` seconds to a
spare thread. A caller that is about to wait may ask for the same while one stands by (`expect`): else an answer that is
there before it has come to wait would wake that one. So may a thread that takes one thing after another, and works in
between (`keep`): to wake one that stands by takes its core from whoever has sent, and tells nobody anything yet.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, Protocol

from rpcbench.agent.interrupts import uninterrupted
from rpcbench.agent.monitor import LONG, Monitor
from rpcbench.transport.bells import Ear
from rpcbench.transport.beside import MOMENT, Beside
from rpcbench.transport.stream import Ending
from rpcbench.transport.watch import Watch
from rpcbench.wire.frames import Frame
from rpcbench.words.errors import ProtocolError
from rpcbench.words.futures import Waits

_Job = Callable[[], object]
PATIENCE = 0.1
"""Seconds after which a thread that waits for an answer reads no more: Ctrl-C is held back meanwhile."""


class Reader(Protocol):
    """A thread that reads."""

    reads: Reading | None
    """What calls that a message brings now wait for."""
    lends: Reading | None
    """What it read until it began the call that it runs."""

    def run_call(self, call: _Job) -> None:
        """Run a user's function."""


class Readers(Protocol):
    """The pool of such threads."""

    @property
    def monitor(self) -> Monitor: ...

    def worker(self) -> Reader:
        """This thread."""

    @property
    def due(self) -> Callable[[], bool]:
        """Whether answers are to come."""

    busy: int
    """How many users' functions run."""

    def begin(self, call: _Job) -> bool:
        """Whether there is room for a call now; else it is run later."""

    def end(self) -> None:
        """A call has ended."""

    def spawn(self, job: _Job) -> None:
        """Run a job on another thread."""


class Source(Protocol):
    """A connection."""

    def read(self) -> Sequence[Frame] | Ending:
        """The next messages, perhaps none yet; or how it has ended."""

    def cut(self) -> None:
        """End it; reads tell of the end from now on."""

    @property
    def watch(self) -> Watch | None:
        """Tells of something to read; None where nobody can."""

    @property
    def beside(self) -> Beside | None:
        """Where to wait for it; None where that is not known."""


class Reading:
    """`receive` takes each message of `source`, `over` hears of its end, once."""

    def __init__(
        self,
        pool: Readers,
        source: Source,
        receive: Callable[[Frame], None],
        over: Callable[[Ending], None],
    ) -> None:
        self._pool = pool
        self._source, self._receive, self._over = source, receive, over
        self._watch, self._beside = source.watch, source.beside
        self._missed = False  # a thread that waits for an answer did not find the token
        self._guarded = False  # a thread stands by for the token, which is on the table or with one that waits
        self._armed = False  # it is woken by what comes
        self._ending: Ending | None = None  # that a thread which waits has met
        self._token = threading.Lock()
        self._token.acquire()
        # All below belongs to the holder of the token.
        self._frames: collections.deque[Frame] = collections.deque()
        self.calls: collections.deque[_Job] = collections.deque()
        self._begun = False

    def read_on(self) -> None:
        """By a worker that holds the token: until another one takes it, or the connection ends."""
        reader = self._pool.worker()
        reader.reads = self
        try:
            ending = self._work(reader)
        except ProtocolError as error:
            ending = Ending(f"it sent nonsense ({error})", False)
        except BaseException:
            self._over(Ending("what it sent could not be handled", False))
            raise
        finally:
            reader.reads = None
        if ending is not None:
            self._over(ending)

    def _work(self, reader: Reader) -> Ending | None:
        """How the connection has ended; None if another thread reads on."""
        calls, frames = self.calls, self._frames
        while True:
            if calls:
                if not self._run(reader, calls.popleft()):
                    return None
            elif frames:
                self._receive(frames.popleft())
            elif self._missed and self._begun and not self._pool.due():
                if (ending := self._stand_by()) is not None:
                    return ending
            else:
                got = self._next()
                if isinstance(got, Ending):
                    return got
                frames.extend(got)

    def _next(self) -> Sequence[Frame] | Ending:
        """What comes next; looked for eagerly, or beside who calls, if at all, where no other thread of ours may be at
        work meanwhile."""
        watch, beside = self._watch, self._beside
        if watch is None or not self._begun:  # what came with the opening of a stream, the system may tell of no more
            self._begun = True
            return self._source.read()
        if self._pool.busy or self._pool.due():  # not alone
            self._sleep(watch)
        elif beside is not None:
            if not _came_beside(beside, watch):
                self._sleep(watch)
                beside.came()
        elif (eager := watch.eager) is None:
            self._sleep(watch)
        elif not eager.soon():
            self._sleep(watch)
            eager.came()
        return self._source.read()

    def _sleep(self, watch: Watch) -> None:
        """Perhaps for long."""
        self._pool.monitor.rest()
        watch.await_some()

    def _run(self, reader: Reader, call: _Job) -> bool:
        """Run a call, unless too many run already; False if another thread reads by now."""
        if not self._pool.begin(call):
            return True
        reader.reads, reader.lends = None, self
        self._rest()
        reader.run_call(call)
        kept = self._take()
        reader.lends = None
        if kept:
            reader.reads = self
        self._pool.end()
        return kept

    # -- the token on the table
    def _rest(self) -> None:
        """Put it there; the monitor sees to it."""
        try:
            self._pool.monitor.laid(self)
        finally:
            self._token.release()

    def _take(self) -> bool:
        """Take it back, unless somebody else has it, or stands by for it."""
        if not self._token.acquire(blocking=False):
            return False
        self._pool.monitor.taken(self)
        if self._guarded:
            self._return()
            return False
        return True

    def hand_over(self) -> None:
        """Let another thread read on if the token lies on the table: nobody has come for it."""
        if self._guarded and self._beside is not None:
            self._beside.in_vain()
        if self._take():
            self._pass_on()

    def _pass_on(self) -> None:
        """Let a worker read on; where no thread can be started, the token is on the table again."""
        try:
            self._pool.spawn(self.read_on)
        except BaseException:
            self._rest()
            raise

    # -- the token beside one who stands by for it
    def _stand_by(self) -> Ending | None:
        """Let threads that wait for an answer read, until something comes that none of them takes: how the connection
        has ended, if one of them has met its end."""
        watch = self._watch
        assert watch is not None, "whoever has missed the token knew one"
        self._missed, self._guarded = False, True
        self._return()
        while True:
            watch.wait()
            if self._token.acquire(blocking=False):
                break
        self._taken()
        self._guarded = self._armed = False
        return self._ending

    def _taken(self) -> None:
        """The token, by whoever has it now; whoever expected to have it next may be another one."""
        self._pool.monitor.taken(self)
        if self._beside is not None:
            self._beside.expected()

    def _return(self) -> None:
        """Put the token beside the one who stands by. In this order: who is woken must find it.

        An end wakes it as soon as it can take the token, so the connection may be gone before the watch is armed.
        """
        watch = self._watch
        assert watch is not None
        self._armed = True
        self._token.release()
        try:
            watch.arm()
        except (OSError, ValueError):  # its descriptor, or the watch itself, is closed
            if not watch.closed:
                raise

    # -- threads that wait for an answer
    def read_while(self, waiting: Waits, quiet: float = LONG, back: bool = False, ear: Ear | None = None) -> None:
        """By a thread that waits: read, if nobody does, until that ends or nothing has come for `quiet` seconds.

        `back`: when it has what it waits for, it goes on as after `keep`. `ear`: of this connection; a bell that rings
        there counts as something that has come.
        """
        with uninterrupted:  # a token that is lost would never be found
            if self._reached():
                self.lead(waiting, quiet, back, ear)

    def expect(self) -> None:
        """By a thread that is about to send, and to wait for what comes then: nobody else need be woken by that.

        Should it not come to wait, the monitor sees to what has come.
        """
        with uninterrupted:
            if self.claim():
                self._rest()

    def keep(self) -> None:
        """By a thread that will soon be back for more: nobody is woken by what comes until then, unless that takes its
        time. One that reads now stands by after its next message."""
        with uninterrupted:
            if self._found():
                self._rest()
            else:
                self._missed = True

    def claim(self) -> bool:
        """As `expect`, by a thread that does nothing else until it does `lead`, and is not interrupted: whether it has
        the token now."""
        if not self._found():
            return False
        if self._beside is not None:
            try:
                self._beside.expect()
            except BaseException:
                self._rest()
                raise
        return True

    def _found(self) -> bool:
        """Whether this thread has the token now, from beside the one who stands by for it, and that one is not to be
        woken."""
        if not self._guarded or not self._token.acquire(blocking=False):
            return False
        if not self._guarded or self._ending is not None:  # by now
            self._return() if self._guarded else self._rest()
            return False
        try:
            self._disarm()
        except BaseException:
            self._rest()
            raise
        return True

    def _reached(self) -> bool:
        """Whether this thread has the token now, and nothing was left for a worker."""
        if not self._token.acquire(blocking=False):
            self._missed = True
            return False
        self._pool.monitor.taken(self)
        if self.calls or self._frames:  # left by who runs a call: a worker is to see to them now
            self._taken()
            self._pass_on()
            return False
        return True

    def _disarm(self) -> None:
        """Who stands by for the token that this thread has now is not to be woken."""
        if self._armed and self._ending is None:
            assert self._watch is not None, "whoever stands by knew one"
            self._watch.disarm()
            self._armed = False

    def lead(self, waiting: Waits, quiet: float = LONG, back: bool = False, ear: Ear | None = None) -> None:
        """By a thread that has the token and is not interrupted: read, as in `read_while`, and leave it to others."""
        ending = self._ending
        try:
            if ending is None:
                if self._armed:
                    self._disarm()
                ending = self._follow(waiting, quiet, ear)
        except ProtocolError as error:
            ending = Ending(f"it sent nonsense ({error})", False)
        except BaseException as error:
            ending = Ending("what it sent could not be handled", False)
            if not isinstance(error, Exception):
                raise
            self._pool.spawn(partial(_raise, error))  # no fault of the call that waits here
        finally:
            if self._beside is not None:
                self._beside.expected()
            self._leave(ending, back and ending is None and not waiting())

    def _follow(self, waiting: Waits, quiet: float, ear: Ear | None) -> Ending | None:
        """How the connection has ended, if it has."""
        watch, until = self._watch, 0.0
        assert watch is not None
        comes = partial(self._comes, watch, quiet) if ear is None else partial(watch.listen, quiet, ear)
        while waiting() and (came := comes()) is not False:
            if came:
                got = self._source.read()
                if isinstance(got, Ending):
                    return got
                for frame in got:
                    self._receive(frame)
            if waiting():  # what has come is something else
                now = time.monotonic()
                until = until or now + PATIENCE
                if now > until:
                    break
        return None

    def _comes(self, watch: Watch, quiet: float) -> bool:
        beside = self._beside
        if beside is None or not beside.stay():
            return watch.readable(quiet, not self._pool.busy)
        try:
            return watch.readable(MOMENT)
        finally:
            beside.rise()

    def _leave(self, ending: Ending | None, back: bool) -> None:
        """By a thread that waits for an answer, and has read."""
        if self._guarded and back:
            self._rest()
        elif self._guarded:
            if ending is not None:
                self._ending = ending
                self._source.cut()  # wakes the one who stands by, and sees to the rest
            self._return()
        elif ending is not None:
            self._pool.spawn(lambda: self._over(ending))
        elif self._pool.due():
            self._pass_on()
        else:
            self._rest()


def _came_beside(beside: Beside, watch: Watch) -> bool:
    """Wait for a moment, on the core of who calls as long as it calls again and again; whether something has come."""
    if not beside.rest():
        return False
    try:
        came = watch.readable(MOMENT)
    finally:
        beside.rise()
    beside.called(came)
    return came


def _raise(error: Exception) -> NoReturn:
    raise error
