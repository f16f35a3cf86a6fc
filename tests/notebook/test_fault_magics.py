"""`%%step` and `%chaos` in a real kernel: nothing blocks the notebook, and nothing is left on."""

from __future__ import annotations

import os
import re

from kinds import kernel_is_long
from worlds import until

STEP = """
%%step {where}
import rpcbench.rpc as rpc
x = rpc.rpc_sync("worker2", divmod, (17, 5))
print("x is", x)
"""
ALL = "while not stepper.cell.done:\n    stepper.deliver() or __import__('time').sleep(0.001)"


def test_a_cell_here_goes_step_by_step(kernel):
    began = kernel.run(STEP.format(where=""))
    assert began.status == "ok", began.traceback
    assert "application/vnd.jupyter.widget-view+json" in began.results[0]
    kernel.run("stepper = _")
    assert kernel.value("[(m.kind, m.to) for m in stepper.wait()]") == "[('Call', 'worker2')]"
    assert kernel.value("stepper.cell").startswith("<cell on notebook: begun")
    assert kernel.value("stepper.deliver().label") == "'divmod'"
    assert kernel.value("[m.kind for m in stepper.wait()]") == "['Result']"
    told = kernel.run("stepper.deliver()\nstepper.cell.wait()")
    shown = "".join(stray["content"].get("text", "") for stray in told.strays)
    assert "x is (3, 2)" in shown and told.text == ""  # where the cell began, not here
    assert kernel.value("x") == "(3, 2)"
    kernel.run("stepper.go()")


def test_a_cell_here_stays_here_while_cells_go_to_a_worker(kernel):
    kernel.run("%autoremote worker1")
    try:
        kernel.run("%%step\nonly_here = 1")
    finally:
        kernel.run("%autoremote off")
    kernel.run("stepper = _")
    assert kernel.run("stepper.cell.wait(20)\nstepper.go()").status == "ok"
    assert kernel.value("only_here") == "1"


def test_clicks_do_what_lines_do(kernel):
    began = kernel.run(STEP.format(where="worker1"))
    kernel.run("stepper = _")
    kernel.run("stepper.wait()")
    comm = next(one["content"]["comm_id"] for one in began.comms if "Deliver next" in str(one["content"]))
    click = {"method": "custom", "content": {"kind": "deliver", "n": int(kernel.value("stepper.held[0].n"))}}
    kernel.say(comm, click)
    assert kernel.value("[m.kind for m in stepper.wait(kind='Result')]") == "['Result']"
    kernel.say(comm, {"method": "custom", "content": {"kind": "go"}})
    assert kernel.run("stepper.cell.wait(20)").status == "ok"
    assert kernel.value("stepper.is_on") == "False"


def test_a_cell_on_a_worker_goes_step_by_step(kernel):
    assert kernel.run(STEP.format(where="worker1")).status == "ok"
    kernel.run("stepper = _")
    assert kernel.value("[(m.kind, m.sender) for m in stepper.wait()]") == "[('Call', 'worker1')]"
    assert kernel.run("%cluster status").status == "ok"
    assert kernel.value("%remote worker2 1 + 1") == "2"
    assert kernel.run(ALL).status == "ok"
    assert kernel.run("stepper.go()").status == "ok"
    assert kernel.value("%remote worker1 x") == "(3, 2)"


def test_an_error_of_the_cell_is_shown_and_raised(kernel):
    kernel.run('%%step\nraise KeyError("mine")')
    kernel.run("stepper = _")
    raised = kernel.run("stepper.cell.wait()")
    assert raised.ename == "KeyError" and "rpcbench" not in raised.traceback
    number = kernel.value("[n for n, cell in enumerate(In) if 'raise KeyError' in cell][0]")
    assert f"Cell In[{number}], line 1" in re.sub(r"\x1b\[[\d;]*m", "", raised.traceback)  # that of its prompt
    assert kernel.run("stepper.go()").status == "ok"
    assert kernel.run("%%step\nx = = 1").ename == "SyntaxError"


def test_an_interrupt_leaves_messages_held_and_the_notebook_usable(kernel):
    kernel.run(STEP.format(where="worker1"))
    kernel.run("stepper = _")
    stopped = kernel.run("stepper.wait()\nprint('now', flush=True)\nstepper.cell.wait()", stop_at=["now"])
    assert stopped.ename == "KeyboardInterrupt"
    assert kernel.value("len(stepper.held)") == "1"
    kernel.run("stepper.go()")
    assert kernel.run("stepper.cell.wait(20)").status == "ok"


def test_mistakes_are_named_with_what_is_right(kernel):
    assert "did you mean Call?" in kernel.run("%%step --hold Cal\npass").evalue
    assert "worker9" in kernel.run("%%step worker9\npass").evalue
    assert "did you mean drop=?" in kernel.run("%chaos dorp=0.1").evalue
    assert "delay=50ms" in kernel.run("%chaos delay=50").evalue
    assert "10%" in kernel.run("%chaos drop=2").evalue
    assert "there is worker1, worker2" in kernel.run("%chaos kill=worker7").evalue
    assert "seed alone" in kernel.run("%chaos seed=7").evalue
    assert kernel.run("%chaos").text.startswith("No faults are on")


def test_chaos_disturbs_programs_and_spares_cells(kernel):
    on = kernel.run("%chaos drop=100% seed=7")
    assert "between all members: drop 100 %; seed 7" in on.text
    assert kernel.run("%chaos").text == on.text
    assert kernel.value("%remote worker1 6 * 7") == "42"
    lost = kernel.run('import rpcbench.rpc as rpc\nrpc.rpc_sync("worker1", abs, (-1,), timeout=0.2)')
    assert lost.ename == "RpcTimeoutError"
    off = kernel.run("%chaos off").text
    sent, gone = map(int, re.findall(r"(?:sent|lost): (\d+)", off))
    assert sent == gone >= 1
    assert kernel.run("%chaos off").text == "No faults were on.\n"
    assert kernel.value('rpc.rpc_sync("worker1", abs, (-1,))') == "1"


def test_chaos_kills_by_a_signal(kernel):
    pid = int(kernel.value('cluster.pid("worker2")'))
    killed = kernel.run("%chaos delay=1ms kill=worker2")
    assert "worker2 was killed" in killed.text and kernel.value("cluster.lost") == "['worker2']"
    until(lambda: not os.path.exists(f"/proc/{pid}"), "its end")
    assert kernel.run("%cluster restart worker2").status == "ok"
    assert kernel.value("(rpc.rpc_sync('worker2', abs, (-2,)), cluster.lost)") == "(2, [])"
    assert "Faults are off" in kernel.run("%chaos off").text


def test_a_worker_that_is_killed_while_held_hangs_nothing(kernel):
    kernel.run(STEP.format(where=""))
    kernel.run("stepper = _")
    assert kernel.value("stepper.wait()[0].to") == "'worker2'"
    assert kernel.run("%chaos kill=worker2").status == "ok"
    assert kernel.run("stepper.cell.wait(30)").ename == "WorkerLostError"
    until(lambda: kernel.value("stepper.held") == "[]", "the end of what worker2 held")
    assert kernel.run("%cluster restart worker2").status == "ok"
    kernel.run("%%remote worker2\nfrom rpcbench.runtime import current")
    count = "%remote worker2 len(current.current_agent().links.interceptors.all)"
    until(lambda: kernel.value(count) == "2", "the stepper's hold on it")
    kernel.run("after = rpc.rpc_async('worker2', abs, (-3,))")
    assert kernel.value("stepper.wait()[0].kind") == "'Call'"  # who comes later is held as well
    kernel.run("stepper.go()")
    assert kernel.value("after.wait()") == "3"


@kernel_is_long
def test_a_cluster_stops_while_messages_are_held(kernel):
    kernel.run(STEP.format(where="worker1"))
    kernel.run("stepper = _")
    kernel.run("stepper.wait()")
    assert "stopped" in kernel.run("%cluster stop").text
    assert kernel.value("(stepper.is_on, stepper.held)") == "(False, [])"
    assert kernel.run("stepper.cell.wait(20)").status == "error"
    assert kernel.run("stepper.go()").status == "ok"
    assert kernel.run(f"%cluster start 2 --kind {kernel.kind}").status == "ok"
