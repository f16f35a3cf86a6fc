"""Input requests of cells on workers: `input()`, `getpass()`, and pages such as those of `obj?`.

Guarantees
- A question goes to the cell's client. It is shown after all that the cell has written before it.
- The client's main thread, which waits for the cell, asks one question after the other: a front end accepts questions
  from no other thread. Each is answered: by the user, by the end of the input, or with the reason for a refusal.
- A wait ends with the answer, an interrupt, or the cell; a prompt ends when its worker leaves or the deadline passes.
- If no user can answer (no cell runs, the cell runs in the background, a forked child) the worker raises
  StdinNotImplementedError with advice.
- A page is shown in the notebook's pager, which opens when the cell ends. So background cells, and cells on several
  workers, show it in their output instead.
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

from rpcbench.base.conditions import Condition, Event
from rpcbench.cells.output import Notice, OutputStream
from rpcbench.cells.widgets import COMM, CommProxies

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo

_BEFORE_ALL_OTHERS = 10  # IPython calls hooks in ascending order; its own have 90 and more


def install_pager(shell: Any, output_stream: OutputStream) -> None:
    """Send the pages that `shell` shows while a cell runs to the cell's client. On a worker."""
    from IPython.core.error import TryNext

    def show_in_pager(_shell: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
        bundle = {"data": data if isinstance(data, dict) else {"text/plain": data}, "metadata": {}}
        if not output_stream.send_item("page", json.dumps(bundle)):
            raise TryNext  # no cell runs: IPython falls back to its own pager

    shell.set_hook("show_in_pager", show_in_pager, _BEFORE_ALL_OTHERS)


def show_page(content: str) -> bool:
    """Show a page in the notebook's pager; return False if there is none."""
    from IPython.core import page
    from IPython.core.getipython import get_ipython

    if not hasattr(get_ipython(), "kernel"):
        return False
    page.page(json.loads(content)["data"])
    return True


ANSWER = "answer"
"""The channel of answers: `question` is a number, `kind` one of the next three, `text` the answer or the reason."""
TEXT, END, REFUSED = "text", "end", "refused"


class Stdin:
    """The open questions of one worker process."""

    def __init__(self, output_stream: OutputStream) -> None:
        self._output_stream = output_stream
        self._numbers = itertools.count()
        self._open: dict[int, queue.SimpleQueue[tuple[str, str]]] = {}  # by number of the question: (kind, text)

    @contextlib.contextmanager
    def divert_input(self) -> Iterator[None]:
        """Make `input` and `getpass.getpass` ask the notebook meanwhile."""
        before = builtins.input, getpass.getpass
        self.install_input()
        try:
            yield
        finally:
            builtins.input, getpass.getpass = before

    def install_input(self) -> None:
        """Like `divert_input`, permanently."""
        builtins.input, getpass.getpass = self.input, self.getpass

    def input(self, prompt: object = "", /) -> str:
        """Like Python's; raises EOFError if the user ends the input."""
        return self._request_input("input()", str(prompt), False)

    def getpass(self, prompt: str = "Password: ", stream: object = None, **_: Any) -> str:
        """Like Python's; ignores `stream`, which is for terminals."""
        return self._request_input("getpass()", prompt, True)

    def answer_received(self, _asker: int, notice: Notice) -> None:
        """Pass an answer to the thread that waits for it. On a pool thread."""
        answers = self._open.get(notice["question"])
        if answers is not None:  # otherwise its cell was interrupted
            answers.put((notice["kind"], notice["text"]))

    def end_questions(self) -> None:
        """End all open questions: the cell has ended, and its other threads get no answer any more."""
        for answers in list(self._open.values()):
            answers.put((END, ""))

    def _request_input(self, name: str, prompt: str, password: bool) -> str:
        number = next(self._numbers)
        answers = self._open[number] = queue.SimpleQueue()
        try:
            if not self._output_stream.send_item(
                "input", json.dumps({"question": number, "prompt": prompt, "password": password})
            ):
                raise _not_here(f"{name} outside a cell: no user can answer; pass the value as an argument")
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


# Reasons for a refusal, shown in the error that the worker raises.
IN_BACKGROUND = "a background cell cannot ask for input; leave --async out, or send the value along with -i"
_ELSEWHERE = "only a cell on the notebook's main thread can ask; send the value along with -i"


class InputRequest(NamedTuple):
    """A question of a worker."""

    asker: WorkerInfo
    number: int  # per worker process
    prompt: str
    password: bool
    over: Callable[[], bool]  # True once no thread waits for the answer


class InputRequests:
    """The questions of one cell. If there is a `refusal`, it answers each of them."""

    def __init__(self, agent: Agent, refusal: str = "") -> None:
        self._agent = agent
        self.pager = not refusal  # pages go to the pager: the notebook waits for the cell
        self._answer_all = (REFUSED, refusal) if refusal else None  # (kind, text) for every question
        self._waiting: collections.deque[InputRequest] = collections.deque()  # appended to by any thread
        self._open: tuple[InputRequest, _EndableWait] | None = None  # the prompt that is shown
        self._changes = Condition()

    def take_over_item(self, worker: WorkerInfo, over: Callable[[], bool], kind: str, content: str) -> bool:
        """Handle an item that is no output but addressed to the notebook; return whether it was one. Thread-safe."""
        if kind == "input":
            request = json.loads(content)
            self._waiting.append(
                InputRequest(worker, request["question"], request["prompt"], request["password"], over)
            )
            self._answer_queued()
            self._changes.notify_all()
            return True
        if kind == COMM:
            self._agent.part(CommProxies).receive_message(worker.id, content)
            return True
        return kind == "page" and self.pager and show_page(content)

    def check_open_prompt(self) -> None:
        """Notice that a worker is through, and end its prompt. From any thread."""
        self._changes.notify_all()
        if (asking := self._open) is not None and asking[0].over():
            asking[1].end_wait()

    def close(self) -> None:
        """Answer all questions from now on with the end of the input."""
        self._answer_all = (END, "")
        self._answer_queued()

    def prompt_until(self, flag: Event, deadline: float) -> bool:
        """Ask questions as they arrive until the flag is set; return False if `deadline` (monotonic) passes first."""
        # The thread that sets the flag calls `check_open_prompt` afterwards, which ends a prompt.
        while True:
            timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            self._changes.wait_for(lambda: flag.is_set() or bool(self._waiting), timeout)
            if flag.is_set() or deadline <= time.monotonic():
                return flag.is_set()
            with contextlib.suppress(IndexError):  # `_answer_queued` has taken it meanwhile
                self._prompt_and_reply(self._waiting.popleft(), deadline)

    def _prompt_and_reply(self, question: InputRequest, deadline: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._send_answer(question, REFUSED, _ELSEWHERE)
            return
        waits = _EndableWait()
        timer = threading.Timer(deadline - time.monotonic(), waits.end_wait)
        self._open = question, waits
        try:
            if deadline < math.inf:
                timer.start()
            if question.over():  # checked after `_open` is set: `check_open_prompt` may have missed it before
                waits.end_wait()
            text = waits.run_wait(functools.partial(_prompt_user, question))
        except EOFError:
            self._send_answer(question, END)
        except NotImplementedError as error:  # the front end has no stdin
            self._send_answer(question, REFUSED, f"{error} Send the value along with -i.")
        else:
            if text is not None:
                self._send_answer(question, TEXT, text)
        finally:
            self._open = None
            timer.cancel()

    def _answer_queued(self) -> None:
        """Answer all queued questions if there is one answer for all."""
        while self._answer_all is not None:
            try:
                question = self._waiting.popleft()
            except IndexError:  # empty; not tested first, as another thread may sweep, too
                return
            self._send_answer(question, *self._answer_all)

    def _send_answer(self, question: InputRequest, kind: str, text: str = "") -> None:
        notice = {"question": question.number, "kind": kind, "text": text}
        # On a pool thread: Ctrl-C must not cut a send in half.
        self._agent.submit(functools.partial(self._agent.notify, question.asker.id, ANSWER, notice))


def _prompt_user(question: InputRequest) -> str:
    # Looked up now: a kernel replaces these functions by its own; in a terminal they are Python's.
    read_input = getpass.getpass if question.password else builtins.input
    return read_input(f"[{question.asker.name}] {question.prompt}")


class _EndableWait:
    """A wait of the main thread that `end`, on another thread, ends by a signal. The signal ends nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both flags, and the signal: it is sent only while `wait` runs
        self._running = False
        self._ended = False  # also before `run_wait`, which then does not wait

    def run_wait(self, wait: Callable[[], str]) -> str | None:
        """Return the result of `wait`, or None after `end`. Raises KeyboardInterrupt for the user's own."""
        try:
            with self._lock:
                self._running = not self._ended
            try:
                return wait() if self._running else None
            finally:
                with self._lock:  # `end` holds it while it sends the signal, which so arrives before this returns
                    self._running = False
        except KeyboardInterrupt:  # from `end`, or the user's Ctrl-C
            if not self._ended:
                raise
            return None

    def end_wait(self) -> None:
        with self._lock:
            first, self._ended = not self._ended, True  # before the signal: the main thread may handle it at once
            if self._running and first:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
