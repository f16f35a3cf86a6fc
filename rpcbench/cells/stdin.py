"""What cells on workers ask the user: `input()`, `getpass()`, and pages such as those of `obj?`.

Guarantees
- A question goes to the member that asked for the cell. It is shown after all that the cell has written before it.
- It is asked there by the main thread, which waits for the cell, one question after the other: a front end takes
  questions from no other thread. Each is answered: by the user, by the end of the input, or by the reason why nobody
  can answer.
- A wait ends with the answer, with an interrupt, or with the cell; a prompt ends with its worker, or the cell's time.
- Where nobody can answer (no cell runs, the cell runs beside the notebook, a forked child) that is said, as
  StdinNotImplementedError with what to do.
- A page is shown in the notebook's pager, which comes with the end of the cell; so a cell beside the notebook, and one
  that runs on several workers, shows it among its output instead.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import getpass
import itertools
import json
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcbench.base.conditions import Changes, Flag
from rpcbench.cells.output import Notice, OutputStream
from rpcbench.cells.widgets import COMM, CommProxies

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo


_BEFORE_ALL_OTHERS = 10


def install_pager(shell: Any, outbox: OutputStream) -> None:
    """On a worker: what `shell` pages while a cell runs goes to the member that asked for the cell."""
    from IPython.core.error import TryNext

    def show_in_pager(_shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
        bundle = {"data": data if isinstance(data, dict) else {"text/plain": data}, "metadata": {}}
        if not outbox.show("page", json.dumps(bundle)):
            raise TryNext

    shell.set_hook("show_in_pager", show_in_pager, _BEFORE_ALL_OTHERS)


def show_page(content: str) -> bool:
    """In the notebook: show it in the pager. False where there is none."""
    from IPython.core import page
    from IPython.core.getipython import get_ipython

    if not hasattr(get_ipython(), "kernel"):
        return False
    page.page(json.loads(content)["data"])
    return True


ANSWER = "answer"
"""The notice that brings an answer: `question` is its number, `kind` one of these, `text` the answer or the reason."""
TEXT, END, REFUSED = "text", "end", "refused"


class Stdin:
    """The questions of one process."""

    def __init__(self, outbox: OutputStream) -> None:
        self._outbox = outbox
        self._numbers = itertools.count()
        self._open: dict[int, queue.SimpleQueue[tuple[str, str]]] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, `input` and `getpass.getpass` ask the notebook."""
        before = builtins.input, getpass.getpass
        self.install()
        try:
            yield
        finally:
            builtins.input, getpass.getpass = before

    def install(self) -> None:
        """As `installed`, for good."""
        builtins.input, getpass.getpass = self.input, self.getpass

    def input(self, prompt: object = "", /) -> str:
        """As Python's: EOFError where the user ends the input."""
        return self._ask("input()", str(prompt), False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: Any) -> str:
        """As Python's; `stream` and the like mean something on a terminal only."""
        return self._ask("getpass()", prompt, True)

    def answered(self, _asker: int, notice: Notice) -> None:
        """An answer has come. On a pool thread."""
        answers = self._open.get(notice["question"])
        if answers is not None:
            answers.put((notice["kind"], notice["text"]))

    def end(self) -> None:
        """The cell is over: nobody answers what its threads still ask."""
        for answers in list(self._open.values()):
            answers.put((END, ""))

    def _ask(self, name: str, prompt: str, password: bool) -> str:
        number = next(self._numbers)
        answers = self._open[number] = queue.SimpleQueue()
        try:
            if not self._outbox.show("input", json.dumps({"question": number, "prompt": prompt, "password": password})):
                raise _not_here(f"{name} outside a cell: nobody is there to answer; pass the value as an argument")
            kind, text = answers.get()
        finally:
            del self._open[number]
        if kind == REFUSED:
            raise _not_here(f"{name}: {text}")
        if kind == END:
            raise EOFError(f"{name}: the input has ended")
        return text


def _not_here(words: str) -> Exception:
    from IPython.core.error import StdinNotImplementedError

    return StdinNotImplementedError(words)


BESIDE = "a cell that runs beside the notebook cannot ask; leave --async out, or send the value along with -i"
_ELSEWHERE = "only a cell on the notebook's main thread can ask; send the value along with -i"


class InputRequest(NamedTuple):
    """`over` says that nobody waits for the answer any more."""

    asker: WorkerInfo
    number: int
    prompt: str
    password: bool
    over: Callable[[], bool]


class InputRequests:
    """The questions of one cell; with a `refusal` each is answered by that.

    `pager` says whether the notebook waits for the cell, so that it has a place for a pager, too.
    """

    def __init__(self, agent: Agent, refusal: str = "") -> None:
        self._agent = agent
        self.pager = not refusal
        self._answer_all = (REFUSED, refusal) if refusal else None
        self._waiting: collections.deque[InputRequest] = collections.deque()
        self._open: tuple[InputRequest, _Breakable] | None = None
        self._changes = Changes()

    def take_over(self, worker: WorkerInfo, over: Callable[[], bool], kind: str, content: str) -> bool:
        """Whether this is no output, but said to the notebook itself: then it is seen to. From any thread."""
        if kind == "input":
            self.put(worker, content, over)
            return True
        if kind == COMM:
            self._agent.part(CommProxies).take(worker.id, content)
            return True
        return kind == "page" and self.pager and show_page(content)

    def put(self, asker: WorkerInfo, content: str, over: Callable[[], bool]) -> None:
        """A worker asks. From any thread."""
        asked = json.loads(content)
        self._waiting.append(InputRequest(asker, asked["question"], asked["prompt"], asked["password"], over))
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

    def _ask(self, question: InputRequest, deadline: float) -> None:
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

    def _reply(self, question: InputRequest, kind: str, text: str = "") -> None:
        notice = {"question": question.number, "kind": kind, "text": text}
        # Not on this thread: Ctrl-C must not cut a send in half.
        self._agent.submit(functools.partial(self._agent.notify, question.asker.id, ANSWER, notice))


def _asked(question: InputRequest) -> str:
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
