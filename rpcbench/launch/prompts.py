"""What a cell's workers ask the user: asked here, one question after the other, by the thread that waits for the cell.

Guarantees
- Only the main thread asks, and only while the cell runs: a front end takes questions from no other.
- Each question is answered: by the user, by the end of the input, or by the reason why nobody can answer.
- A question does not outlive its asker: when the worker is lost, or the cell's time is over, the prompt ends.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import getpass
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rpcbench.base.conditions import Changes, Flag
from rpcbench.launch import pager
from rpcbench.launch.comms import COMM
from rpcbench.launch.mirrors import Mirrors
from rpcbench.launch.stdin import ANSWER, END, REFUSED, TEXT

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo

BESIDE = "a cell that runs beside the notebook cannot ask; leave --async out, or send the value along with -i"
_ELSEWHERE = "only a cell on the notebook's main thread can ask; send the value along with -i"


class Question(NamedTuple):
    """`over` says that nobody waits for the answer any more."""

    asker: WorkerInfo
    number: int
    prompt: str
    password: bool
    over: Callable[[], bool]


class Prompts:
    """The questions of one cell; with a `refusal` each is answered by that.

    `pager` says whether the notebook waits for the cell, so that it has a place for a pager, too.
    """

    def __init__(self, agent: Agent, refusal: str = "") -> None:
        self._agent = agent
        self.pager = not refusal
        self._answer_all = (REFUSED, refusal) if refusal else None
        self._waiting: collections.deque[Question] = collections.deque()
        self._open: tuple[Question, _Breakable] | None = None
        self._changes = Changes()

    def take_over(self, worker: WorkerInfo, over: Callable[[], bool], kind: str, content: str) -> bool:
        """Whether this is no output, but said to the notebook itself: then it is seen to. From any thread."""
        if kind == "input":
            self.put(worker, content, over)
            return True
        if kind == COMM:
            self._agent.part(Mirrors).take(worker.id, content)
            return True
        return kind == "page" and self.pager and pager.show(content)

    def put(self, asker: WorkerInfo, content: str, over: Callable[[], bool]) -> None:
        """A worker asks. From any thread."""
        asked = json.loads(content)
        self._waiting.append(Question(asker, asked["question"], asked["prompt"], asked["password"], over))
        self._sweep()
        self._changes.tell()

    def look(self) -> None:
        """A worker is through, so whatever it has asked is over. From any thread."""
        self._changes.tell()
        if (asking := self._open) is not None and asking[0].over():
            asking[1].end()

    def close(self) -> None:
        """Nobody answers any more: the input has ended."""
        self._answer_all = (END, "")
        self._sweep()

    def attend(self, flag: Flag, deadline: float) -> bool:
        """Ask whatever comes until the flag is set; False if it is not by `deadline` (monotonic seconds). Whoever sets
        it calls `look`."""
        while True:
            timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            self._changes.wait_for(lambda: flag.is_set() or bool(self._waiting), timeout)
            if flag.is_set() or deadline <= time.monotonic():
                return flag.is_set()
            with contextlib.suppress(IndexError):  # swept away meanwhile
                self._ask(self._waiting.popleft(), deadline)

    def _ask(self, question: Question, deadline: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._reply(question, REFUSED, _ELSEWHERE)
            return
        waits = _Breakable()
        self._open = question, waits
        try:
            with _ended_at(deadline, waits):
                if question.over():
                    waits.end()
                text = waits.run(functools.partial(_asked, question))
        except EOFError:
            self._reply(question, END)
        except NotImplementedError as error:  # the front end's own refusal
            self._reply(question, REFUSED, f"{error} Send the value along with -i.")
        else:
            if text is not None:
                self._reply(question, TEXT, text)
        finally:
            self._open = None

    def _sweep(self) -> None:
        """Once all have the same answer, give it."""
        while self._answer_all is not None:
            try:
                question = self._waiting.popleft()
            except IndexError:
                return
            self._reply(question, *self._answer_all)

    def _reply(self, question: Question, kind: str, text: str = "") -> None:
        notice = {"question": question.number, "kind": kind, "text": text}
        # Not on this thread: Ctrl-C must not cut a send in half.
        self._agent.submit(functools.partial(self._agent.notify, question.asker.id, ANSWER, notice))


def _asked(question: Question) -> str:
    """What the user says: a kernel has put its own functions here, a terminal has Python's."""
    ask = getpass.getpass if question.password else builtins.input
    return ask(f"[{question.asker.name}] {question.prompt}")


@contextlib.contextmanager
def _ended_at(deadline: float, waits: _Breakable) -> Iterator[None]:
    if deadline == math.inf:
        yield
        return
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), waits.end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Breakable:
    """Runs a wait of the main thread. `end`, from another thread, ends it by a signal, and nothing else.

    Where `end` comes first there is no wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = False
        self._ended = False

    def run(self, wait: Callable[[], str]) -> str | None:
        """What `wait` returns; None where it was ended. KeyboardInterrupt where the user did that."""
        try:
            with self._lock:
                self._running = not self._ended
            try:
                return wait() if self._running else None
            finally:
                with self._lock:  # who ends it has it, so the signal comes before this is over
                    self._running = False
        except KeyboardInterrupt:
            if not self._ended:
                raise
            return None

    def end(self) -> None:
        with self._lock:
            first, self._ended = not self._ended, True  # before the signal, which the main thread may handle at once
            if self._running and first:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
