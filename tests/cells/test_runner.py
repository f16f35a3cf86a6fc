"""The main thread of a worker runs one cell after another, and an interrupt hits the cell that it names or nothing."""

from __future__ import annotations

import json
import queue
import random
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from worlds import PATIENCE, until

from rpcbench.base.errors import CallCancelled
from rpcbench.base.rebuild import MOST_TEXT
from rpcbench.cells import runner
from rpcbench.cells.output import CellKey
from rpcbench.cells.runner import Cell, CellRunner
from rpcbench.cells.shell import Outcome
from rpcbench.runtime.interceptors import AgentHooks


class Agent:
    """The part of an agent that a runner needs."""

    name, incarnation, is_fork = "worker1", 0, False

    def __init__(self):
        self.handlers = {}
        self.texts = []
        self.heard = []
        self.ended = queue.SimpleQueue()
        self.calls = SimpleNamespace(values=SimpleNamespace(remote_cell=None))
        self.health = SimpleNamespace(cells=[])
        self.hooks = AgentHooks()

    def part(self, kind):
        return self.health

    def has(self, kind):
        return False

    def on_notice(self, channel, handler):
        self.handlers[channel] = handler

    def submit(self, job):
        job()

    def member(self, to):
        return to  # no client has left

    def notify(self, member, channel, notice):
        if channel == runner.INTERRUPT_HANDLED:
            self.heard.append(notice)
            return
        if channel == runner.QUEUED:
            return
        self.handlers[runner.SHOWN](member, {"cell": notice["cell"], "shown": notice["n"] + 1})
        if notice["kind"] == "end":
            self.end = notice["content"]
            self.ended.put(notice["cell"])
        else:
            self.texts.append(notice["content"])


class Bench:
    """A runner that serves on this thread while `script` runs on another one; cells are functions of this test."""

    def __init__(self, monkeypatch):
        self.agent = Agent()
        self.runner = CellRunner(self.agent)
        self.code = {}
        monkeypatch.setattr(self.runner, "_run_in_shell", self._run)

    async def _run(self, cell):
        return Outcome({"": self.code[cell.number]()})

    def ask(self, number, function):
        """The value of the cell, or the error that its caller gets."""
        self.code[number] = function
        try:
            return self.runner.run_queued(CellKey(0, number), Cell(number, ""))[""]
        except CallCancelled as error:
            return error

    def interrupt(self, number):
        self.agent.handlers[runner.INTERRUPT](0, {"cell": number})

    def serve(self, script):
        """Serve until the script has ended; raise its error."""
        failed = []

        def run():
            try:
                script()
            except BaseException as error:
                failed.append(error)
            finally:
                self.runner.stop_serving()

        thread = threading.Thread(target=run)
        thread.start()
        self.runner.serve_cells()
        thread.join()
        if failed:
            raise failed[0]


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


def in_background(function):
    """Run a function on a new thread; return a function that joins the thread and returns the value."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return lambda: (thread.join(PATIENCE), found[0])[1]


def sleeper(started):
    def cell():
        started.set()
        _sleep()

    return cell


def _sleep():
    """Sleep for 30 s, in short naps: Python misses a signal that comes just before it begins to sleep."""
    for _ in range(600):
        time.sleep(0.05)


def test_queued_cells_run_on_the_main_thread(bench):
    ran = []

    def script():
        begun, gate = threading.Event(), threading.Event()
        results = [in_background(lambda: bench.ask(0, lambda: begun.set() or gate.wait(PATIENCE)))]
        assert begun.wait(PATIENCE)  # else a later cell could come first, and be queued no more
        for number in range(1, 4):
            results.append(in_background(lambda n=number: bench.ask(n, lambda: ran.append(threading.current_thread()))))
            until(lambda n=number: bench.runner._jobs.qsize() == n, "a queued cell")
        gate.set()
        assert [result() for result in results] == [True, None, None, None]

    bench.serve(script)
    assert ran == [threading.main_thread()] * 3


def test_an_interrupt_ends_its_cell_at_once_and_a_late_one_does_not_hit_the_next(bench):
    def script():
        started = threading.Event()
        first = in_background(lambda: bench.ask(1, sleeper(started)))
        started.wait(PATIENCE)
        bench.interrupt(1)
        assert isinstance(first(), CallCancelled)
        next_started, told = threading.Event(), threading.Event()
        spared = lambda: next_started.set() or (told.wait(PATIENCE) and "spared")  # noqa: E731
        following = in_background(lambda: bench.ask(2, spared))
        next_started.wait(PATIENCE)
        bench.interrupt(1)
        told.set()
        assert following() == "spared"

    bench.serve(script)


def test_code_of_a_cell_lets_others_interrupt_a_block_of_it_alone(bench):
    """Also the thread that calls late, after the block, changes nothing: neither the cell nor the next one ends."""
    entered, kept = threading.Event(), []

    def cell():
        try:
            with bench.runner.interruptible_block() as interrupt:
                kept.append(interrupt)
                entered.set()
                _sleep()
        except KeyboardInterrupt:
            late = threading.Thread(target=interrupt)
            late.start()
            late.join()
            return "interrupted"

    def later():
        with bench.runner.interruptible_block():
            late = threading.Thread(target=kept[0])
            late.start()
            late.join()
        return "not hit"

    def script():
        first = in_background(lambda: bench.ask(1, cell))
        entered.wait()
        kept[0]()
        assert first() == "interrupted"
        assert bench.ask(2, later) == "not hit"

    bench.serve(script)


def test_each_of_several_cells_in_a_row_can_be_interrupted(bench):
    def script():
        for number in range(3):
            started = threading.Event()
            cell = in_background(lambda n=number, s=started: bench.ask(n, sleeper(s)))
            started.wait(PATIENCE)
            bench.interrupt(number)
            assert isinstance(cell(), CallCancelled)
            assert bench.agent.heard.pop() == {"cell": number, "runs": True}

    bench.serve(script)
    assert bench.agent.heard == []


def test_a_second_interrupt_of_a_cell_is_delivered_after_a_minimum_interval(bench, monkeypatch):
    monkeypatch.setattr(runner, "_MIN_INTERVAL_SECONDS", 0.5)  # longer than the way to the `except` below takes

    def script():
        caught, started = [], threading.Event()

        def stubborn():
            while len(caught) < 2:
                try:
                    started.set()
                    _sleep()
                except KeyboardInterrupt:
                    caught.append(bench.runner._raised)

        cell = in_background(lambda: bench.ask(1, stubborn))
        started.wait(PATIENCE)
        bench.interrupt(1)
        bench.interrupt(1)
        assert cell() is None
        assert caught[1] - caught[0] >= runner._MIN_INTERVAL_SECONDS

    bench.serve(script)


@pytest.mark.parametrize(
    ("file", "name"),
    [(runner._RUNTIME[0] + "sending.py", "send"), runner._RENDERING],
    ids=["a send", "a traceback"],
)
def test_an_interrupt_waits_while_the_main_thread_sends_or_renders_a_traceback(bench, file, name):
    started, sent, lines = threading.Event(), threading.Event(), []
    code = "started.set()\n    while not sent.is_set(): time.sleep(0.001)\n    lines.append('sent')"
    send = compile(f"def {name}():\n    {code}\n{name}()", file, "exec")

    def cell():
        exec(send, {"started": started, "sent": sent, "lines": lines, "time": time})
        while True:
            time.sleep(0.001)

    def script():
        result = in_background(lambda: bench.ask(1, cell))
        started.wait(PATIENCE)
        interrupt = in_background(lambda: bench.interrupt(1))
        until(lambda: bench.agent.heard)  # at least one signal has arrived, without effect
        sent.set()
        assert isinstance(result(), CallCancelled)
        interrupt()

    bench.serve(script)
    assert lines == ["sent"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose import sets `begun`, and then waits for `let_go`: both are events of this fixture's value."""
    events = SimpleNamespace(begun=threading.Event(), let_go=threading.Event())
    (tmp_path / "slow_package").mkdir()
    lines = (
        "import time, events_of_import as events\nfrom . import first\nevents.begun.set()\n"
        "while not events.let_go.is_set(): time.sleep(0.001)\nfrom . import last\n"
    )
    for name, text in {"__init__": lines, "first": "", "last": "value = 7\n"}.items():
        (tmp_path / "slow_package" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "events_of_import", events)
    yield events
    for name in [name for name in sys.modules if name.startswith("slow_package")]:
        del sys.modules[name]


def import_package():
    import slow_package

    _sleep()
    return slow_package


def external_interrupt(bench):
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


INTERRUPTS = pytest.mark.parametrize(
    "interrupt", [lambda bench: bench.interrupt(1), external_interrupt], ids=["client", "signal"]
)


def interrupt_an_import(bench, package, interrupt, end_import):
    def script():
        result = in_background(lambda: bench.ask(1, import_package))
        package.begun.wait(PATIENCE)
        first = in_background(lambda: interrupt(bench))
        until(lambda: any(each.awaits_import for each in bench.runner._interrupts), "an interrupt that waits")
        end_import()
        assert isinstance(result(), CallCancelled)
        first()

    bench.serve(script)


@INTERRUPTS
def test_an_interrupt_waits_for_the_end_of_an_import(bench, package, interrupt):
    interrupt_an_import(bench, package, interrupt, package.let_go.set)
    assert sys.modules["slow_package"].last.value == 7


@INTERRUPTS
def test_a_second_interrupt_cuts_an_import_that_does_not_end(bench, package, interrupt):
    interrupt_an_import(bench, package, interrupt, lambda: interrupt(bench))
    assert "slow_package" not in sys.modules


def test_the_end_of_the_worker_cuts_an_import(bench, package):
    def script():
        in_background(lambda: bench.ask(1, import_package))
        package.begun.wait(PATIENCE)

    bench.serve(script)
    assert bench.agent.ended.get(timeout=PATIENCE) == 1


def test_a_cell_that_was_interrupted_before_its_turn_does_not_run(bench):
    def script():
        ran = []
        bench.interrupt(5)
        assert bench.agent.heard == [{"cell": 5, "runs": False}]
        assert isinstance(bench.ask(5, lambda: ran.append(1)), CallCancelled)
        assert bench.ask(6, lambda: "next") == "next"
        assert ran == []

    bench.serve(script)


def test_an_external_sigint_ends_the_running_cell_and_does_not_affect_an_idle_worker(bench):
    def script():
        bench.ask(0, lambda: None)
        main = threading.main_thread().ident
        signal.pthread_kill(main, signal.SIGINT)
        started = threading.Event()
        cell = in_background(lambda: bench.ask(1, lambda: [started.set(), *(time.sleep(0.01) for _ in range(1000))]))
        started.wait(PATIENCE)
        signal.pthread_kill(main, signal.SIGINT)
        assert isinstance(cell(), CallCancelled)

    bench.serve(script)


def test_interrupts_at_any_moment_neither_end_the_worker_nor_hit_another_cell(bench):
    chance = random.Random(1)

    def busy():
        return sum(range(chance.randrange(4000)))

    def script():
        for number in range(0, 300, 2):
            cell = in_background(lambda n=number: bench.ask(n, busy))
            for _ in range(chance.randrange(3)):
                time.sleep(chance.random() / 2000)
                bench.interrupt(number)
            assert isinstance(bench.ask(number + 1, busy), int), "an interrupt hit another cell"
            assert isinstance(cell(), int | CallCancelled)

    bench.serve(script)
    assert sorted(bench.agent.ended.get(timeout=10) for _ in range(300)) == list(range(300))


def test_a_signal_handler_that_a_cell_installs_is_removed_after_the_cell(bench):
    def script():
        bench.ask(0, lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        started = threading.Event()
        cell = in_background(lambda: bench.ask(1, sleeper(started)))
        started.wait(PATIENCE)
        bench.interrupt(1)
        assert isinstance(cell(), CallCancelled)

    bench.serve(script)


def test_streams_and_the_signal_handler_are_restored(bench, monkeypatch):
    before = sys.stdout, sys.stderr, signal.getsignal(signal.SIGINT)
    bench.serve(lambda: print("not for a cell") or bench.ask(0, lambda: None))
    assert (sys.stdout, sys.stderr, signal.getsignal(signal.SIGINT)) == before
    other = Bench(monkeypatch)
    other.serve(lambda: other.ask(1, lambda: print("for a cell")))
    assert (bench.agent.ended.get(timeout=10), other.agent.ended.get(timeout=10)) == (0, 1)
    assert (bench.agent.texts, "".join(other.agent.texts)) == ([], "for a cell\n")
    assert (sys.stdout, sys.stderr, signal.getsignal(signal.SIGINT)) == before


def test_stop_interrupts_the_running_cell_and_cancels_a_queued_one(bench):
    begun, seen = threading.Event(), []

    def script():
        first = in_background(lambda: bench.ask(1, lambda: (begun.set(), _sleep())))
        assert begun.wait(PATIENCE)
        second = in_background(lambda: bench.ask(2, lambda: seen.append("it began")))
        until(lambda: bench.runner._jobs.qsize() == 1, "a queued cell")
        assert bench.agent.health.cells[0]() == 2
        bench.runner.stop_serving()
        for error in first(), second():
            assert isinstance(error, CallCancelled) and "KeyboardInterrupt" in str(error)

    bench.serve(script)
    assert seen == []


def test_a_stopping_worker_still_reports_the_handling_of_interrupts(bench):
    begun, sent = threading.Event(), threading.Event()
    code = compile("begun.set()\nwhile not sent.is_set(): time.sleep(0.001)", runner._RUNTIME[0] + "sending.py", "exec")

    def script():
        cell = in_background(lambda: bench.ask(1, lambda: exec(code, {"begun": begun, "sent": sent, "time": time})))
        assert begun.wait(PATIENCE)
        interrupt = in_background(lambda: bench.interrupt(1))
        until(lambda: bench.agent.heard)
        stop = in_background(bench.runner.stop_serving)
        until(lambda: bench.runner._stopping)
        count = len(bench.agent.heard)
        until(lambda: len(bench.agent.heard) > count + 1)
        sent.set()
        cell(), interrupt(), stop()

    bench.serve(script)


def test_run_cell_on_a_member_without_a_runner_raises(monkeypatch):
    monkeypatch.setattr(runner, "current_agent", lambda: Agent())
    with pytest.raises(RuntimeError, match="worker1 runs no cells"):
        runner.run_cell(Cell(0, ""))


def test_running_and_queued_cells_are_counted(bench):
    begun, go = threading.Event(), threading.Event()

    def script():
        first = in_background(lambda: bench.ask(1, lambda: (begun.set(), go.wait(PATIENCE))))
        assert begun.wait(PATIENCE)
        second = in_background(lambda: bench.ask(2, lambda: None))
        until(lambda: bench.agent.health.cells[0]() == 2)
        go.set()
        first(), second()
        assert bench.agent.health.cells[0]() == 0

    bench.serve(script)


def test_a_long_traceback_is_truncated(bench, monkeypatch):
    async def fail(cell):
        return Outcome(error=ValueError("x"), traceback=("in the cell", "y" * (MOST_TEXT + 50)))

    monkeypatch.setattr(bench.runner, "_run_in_shell", fail)

    def script():
        with pytest.raises(ValueError, match="x"):
            bench.ask(1, None)
        bench.agent.ended.get(timeout=10)

    bench.serve(script)
    first, second = json.loads("".join([*bench.agent.texts, bench.agent.end]))["traceback"]
    assert first == "in the cell" and "50 characters are left out" in second
