"""Cells on workers through a real kernel: what a user sees, and that the cluster is usable after every mishap."""

from __future__ import annotations

import base64
import contextlib
import queue
import re
import textwrap
import threading
import time

import pytest
from kinds import kernel_is_long
from worlds import PATIENCE, until

pytestmark = pytest.mark.process

SHOWN = {"stream", "display_data", "update_display_data", "execute_result", "error", "clear_output"}
SLEEP = "import time\nprint('ready')\nwhile True:\n    time.sleep(0.01)"
AT = r"----> (2 print|3 while|4     time)"  # its place once the text is seen


@pytest.fixture(autouse=True)
def usable_afterwards(kernel):
    """After each test both workers still run cells, and nothing is shown that was not asked for."""
    yield
    after = kernel.run("%%remote all\nprint('usable')")
    assert (after.status, sorted(after.text.splitlines())) == ("ok", ["[worker1] usable", "[worker2] usable"])
    assert [m["content"] for m in after.strays if m["msg_type"] in SHOWN] == []


def test_output_is_live_and_in_the_asking_cell(kernel, tmp_path):
    seen = tmp_path / "seen"
    wait = f"while not pathlib.Path({str(seen)!r}).exists():\n    time.sleep(0.01)"
    cell = kernel.client.execute(f"%%remote worker1\nimport pathlib, time\nprint('first')\n{wait}\n'result'")
    shown = []
    while not shown or shown[-1]["msg_type"] != "display_data":
        message = kernel.client.get_iopub_msg(timeout=30)
        if message["msg_type"] in SHOWN:  # no panel of a cell before
            shown.append(message)
            seen.touch()  # the cell goes on only because its first line was shown
    assert kernel.answer(cell)["status"] == "ok"
    while (message := kernel.client.get_iopub_msg(timeout=30))["msg_type"] != "status":
        pass  # of a panel of a cell before
    assert message["content"]["execution_state"] == "idle"
    assert {m["parent_header"]["msg_id"] for m in shown} == {cell}
    assert "".join(m["content"]["text"] for m in shown[:-1] if m["content"]["name"] == "stdout") == "first\n"
    assert shown[-1]["content"]["data"]["text/plain"] == "'result'"


def test_displays_keep_their_form_and_their_order(kernel):
    reply = kernel.run(
        "%%remote worker1\nfrom IPython.display import HTML, Image, display\n"
        "print('first')\nhandle = display(HTML('<b>one</b>'), display_id='d')\nhandle.update(HTML('<b>two</b>'))\n"
        "print('last')\nImage(data=b'\\x89PNG', format='png')"
    )
    assert [kind for kind, _ in reply.outputs] == [
        "stream", "display_data", "update_display_data", "stream", "display_data"
    ]  # fmt: skip
    assert reply.outputs[2][1]["data"]["text/html"] == "<b>two</b>"
    assert reply.results[1]["image/png"] == "iVBORw=="


def test_all_workers_are_labelled_and_run_at_once(kernel, tmp_path):
    meet = f"""
import os, pathlib, time
here = pathlib.Path({str(tmp_path)!r})
(here / str(os.getpid())).touch()
deadline = time.monotonic() + 20
while len(list(here.iterdir())) < 2:
    assert time.monotonic() < deadline, "the other one does not run"
    time.sleep(0.01)
print('met', end='')
'done'"""
    reply = kernel.run(f"%%remote all{meet}")
    lines = reply.text.splitlines()
    assert sorted(lines) == [f"[worker{i}] {text}" for i in (1, 2) for text in ("'done'", "met")]
    assert [line for line in lines if "done" in line] == ["[worker1] 'done'", "[worker2] 'done'"]


def test_variables_go_there_and_come_back_as_values(kernel):
    kernel.run("import torch\na, b = torch.ones(3), {'k': 2}")
    assert kernel.run("%%remote worker1 -i a,b -o y\ny = a * b['k']").status == "ok"
    assert kernel.value("y") == "tensor([2., 2., 2.])"
    assert kernel.run("%%remote all -i b -o me\nimport os\nme = (b['k'], os.getpid())").status == "ok"
    assert kernel.value("{w: (k, pid == cluster.pid(w)) for w, (k, pid) in me.items()}") == str(
        {"worker1": (2, True), "worker2": (2, True)}
    )
    assert kernel.value("%remote worker1 y.sum()") == "tensor(6.)"


def test_an_rref_that_a_cell_was_given_is_let_go_of_with_the_last_name(kernel):
    """Not when the garbage collector runs."""
    kernel.run("import gc, weakref\ngc.disable()\ngiven = cluster.remote('worker1', list)\nseen = weakref.ref(given)")
    try:
        assert kernel.run("%%remote all -i given\nNone").status == "ok"
        kernel.run("del given")
        until(lambda: kernel.value("seen() is None") == "True")
    finally:
        kernel.run("gc.enable()")


def test_cells_define_what_calls_by_reference_find(kernel):
    kernel.run("%%remote worker1\ndef where():\n    return 'the worker'")
    kernel.run("def where():\n    return 'the notebook'")
    assert kernel.value("%remote worker1 where() + ', ' + where.__module__") == "'the worker, __main__'"


def test_an_error_keeps_its_type_and_shows_the_remote_line(kernel):
    reply = kernel.run("%%remote worker1\ndef divide(x):\n    return x / 0\n\ndivide(1)")
    assert (reply.status, reply.ename, reply.evalue) == ("error", "ZeroDivisionError", "division by zero")
    assert "----> 3     return x / 0" not in reply.traceback
    assert "----> 2     return x / 0" in reply.traceback
    assert "Cell worker1[" in reply.traceback
    assert "rpcbench" not in reply.traceback, "frames of the machinery"
    assert "site-packages" not in reply.traceback


def test_errors_that_say_what_is_wrong_end_at_the_users_line_and_so_do_their_causes(kernel):
    kernel.run("import threading, torch\nfrom rpcbench.pipeline import split\nfrom rpcbench.rpc import rpc_sync")
    reply = kernel.run("split(torch.nn.Sequential(torch.nn.Linear(1, 1)), cluster.workers)")
    assert reply.ename == "PipelineError" and "----> 1 split(" in reply.traceback
    assert "rpcbench" not in reply.traceback, "frames of the machinery"
    kernel.run("from rpcbench import named\nnames = named.rand(2, names=('N',))")
    reply = kernel.run("names.sum('Z')")
    assert reply.ename == "NamesError" and "----> 1 names.sum(" in reply.traceback
    assert "rpcbench" not in reply.traceback, "frames of the machinery"
    reply = kernel.run("rpc_sync('worker1', print, (threading.Lock(),))")
    assert reply.ename == "SerializationError" and "TypeError: cannot pickle" in reply.traceback
    assert "rpcbench" not in reply.traceback, "frames of the machinery"


def test_a_syntax_error_shows_only_the_remote_cell(kernel):
    reply = kernel.run("%%remote worker1\nx = = 1")
    assert (reply.status, reply.ename) == ("error", "SyntaxError")
    assert "x = = 1" in reply.traceback
    assert "run_cell_magic" not in reply.traceback
    assert kernel.run("y = = 1").traceback.strip().startswith("Cell In[")


def test_a_class_of_error_that_only_the_worker_has_is_shown_as_it_was(kernel):
    reply = kernel.run("%%remote worker1\nclass Odd(Exception):\n    def __init__(self, a, b): pass\nraise Odd(1, 2)")
    assert reply.status == "error"
    assert "----> 3 raise Odd(1, 2)" in reply.traceback


def test_leaving_is_an_error_not_the_end_of_the_worker(kernel):
    reply = kernel.run("%%remote worker1\nraise SystemExit(3)")
    assert reply.status == "error"
    assert "SystemExit" in reply.traceback


def test_the_stop_button_interrupts_everywhere_and_shows_where_it_stood(kernel):
    reply = kernel.run(f"%%remote all\n{SLEEP}", stop_at=[["[worker1] ready", "[worker2] ready"]])
    assert (reply.status, reply.ename) == ("error", "KeyboardInterrupt")
    assert len(re.findall(AT, reply.traceback)) == 2
    assert "[worker1]" in reply.traceback
    assert "[worker2]" in reply.traceback
    assert "rpcbench" not in reply.traceback, "frames of the machinery"


def test_a_second_press_waits_no_longer_and_says_who_still_runs(kernel, tmp_path):
    """Were it waited for, the test would hang; the first press waits until the second one comes, however late."""
    kernel.run("import rpcbench.cells.client as desk\npatience, handling = desk.PATIENCE, desk._HANDLING_SECONDS")
    kernel.run("desk.PATIENCE = desk._HANDLING_SECONDS = 3600.0")
    code = "%%remote worker1\nimport time\ntry:\n    print('ready')\n    while True:\n        time.sleep(0.01)\n"
    tidy = textwrap.indent(f"print('tidying')\n{_until(tmp_path / 'go')}", "    ")
    try:
        reply = kernel.run(f"{code}finally:\n{tidy}", stop_at=[["ready"], ["tidying\n"]])
    finally:
        (tmp_path / "go").touch()
        kernel.run("desk.PATIENCE, desk._HANDLING_SECONDS = patience, handling")
    assert reply.ename == "KeyboardInterrupt"
    assert "the cell had not ended yet on worker1: `%cluster status` says whether it still runs" in reply.traceback


@kernel_is_long
def test_the_prompt_comes_back_from_code_that_looks_at_no_signal(kernel, tmp_path):
    """Were it waited for, the test would hang."""
    kernel.run("import rpcbench.cells.client as desk\npatience, desk.PATIENCE = desk.PATIENCE, 3600.0")
    kernel.run("handling, desk._HANDLING_SECONDS = desk._HANDLING_SECONDS, 0.35")
    begun = tmp_path / "begun"  # what it prints is not shown any more, as it leaves no other thread a turn
    items = f"itertools.chain(map(os.mkdir, [{str(begun)!r}]), itertools.repeat(None))"  # once it runs in C
    loop = f"collections.deque({items}, maxlen=0)"
    stop = threading.Thread(target=lambda: (until(begun.exists), kernel.interrupt()))
    stop.start()
    reply = kernel.run(f"%%remote worker1\nimport collections, itertools, os\n{loop}")
    stop.join()
    assert reply.ename == "KeyboardInterrupt"
    assert "the cell had not ended yet on worker1: `%cluster status` says whether it still runs" in reply.traceback
    assert kernel.run("%%remote worker2\nprint('usable')").text == "usable\n"
    assert "Started again: worker1" in kernel.run("%cluster restart worker1").text
    kernel.run("desk.PATIENCE, desk._HANDLING_SECONDS = patience, handling")


def test_the_prompt_comes_back_from_a_cell_that_waits_for_another(kernel, tmp_path):
    kernel.run(f"%%remote worker1 --async\nprint('first')\n{_until(tmp_path / 'go')}")
    kernel.run("handle, desk = _, __import__('rpcbench.cells.client').cells.client")
    kernel.run("patience, desk.PATIENCE = desk.PATIENCE, 3600.0")
    kernel.run("handling, desk._HANDLING_SECONDS = desk._HANDLING_SECONDS, 2.0")  # for late output of such a cell
    second = """
import threading
def told(client=cluster.agent.part(desk.CellClient)):
    while not client._answering:  # a Ctrl-C before the cell is sent has another text
        threading.Event().wait(0.01)
    print('waiting')
threading.Thread(target=told).start()
get_ipython().run_cell_magic('remote', 'worker1', 'print(1)')"""
    try:
        reply = kernel.run(second, stop_at=[["waiting"]])
        assert (reply.ename, reply.evalue) == ("KeyboardInterrupt", "the cell was interrupted")
    finally:
        (tmp_path / "go").touch()
        kernel.run("desk.PATIENCE, desk._HANDLING_SECONDS = patience, handling")
    assert kernel.run("handle.wait()").status == "ok"
    assert kernel.run("%%remote worker1\nprint(2)").text == "2\n"


def test_a_cell_does_not_overtake_one_whose_inputs_take_long_to_pickle(kernel):
    kernel.run("""
import time
class Slow:
    def __reduce__(self):
        time.sleep(0.5)
        return int, (7,)
slow = Slow()""")
    kernel.run("%%remote worker1 --async -i slow\nresult = slow + 1")
    kernel.run("handle = _")
    assert kernel.run("%%remote worker1\nprint(result)").text == "8\n"
    assert kernel.run("handle.wait()").status == "ok"


def test_the_stop_button_silences_a_flood(kernel):
    reply = kernel.run("%%remote worker1\nprint('ready')\nwhile True:\n    print('x' * 100)", stop_at=[["ready"]])
    assert reply.ename == "KeyboardInterrupt"
    assert reply.outputs[-1][0] == "error"


def test_output_of_children_and_of_c_code_is_in_the_cell_in_order(kernel):
    reply = kernel.run("""%%remote worker1
import ctypes, multiprocessing, os, subprocess, sys
from torch.utils.data import DataLoader
class Rows:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        print("5 loader")
        return index
print("1 python")
os.system("echo 2 system")
subprocess.run(["sh", "-c", "echo 3 child; echo 4 error >&2"])
for _ in DataLoader(Rows(), num_workers=1):
    pass
os.write(2, b"6 write\\n")
print("7 python", file=sys.stderr)
child = multiprocessing.get_context("fork").Process(target=lambda: 1 / 0, name="fails")
child.start()
child.join()
sys.stdout.buffer.write(b"9 bytes\\n")
None
""")
    assert reply.status == "ok"
    lines = [line for line in reply.text.splitlines() if line[:1].isdigit() or "Error" in line]
    assert [line[:3] for line in lines] == ["1 p", "2 s", "3 c", "4 e", "5 l", "6 w", "7 p", "Zer", "9 b"]


def test_output_of_a_thread_goes_to_the_cell_that_runs(kernel):
    kernel.run(
        "%%remote worker1\nimport threading\ngo = threading.Event()\n"
        "late = threading.Thread(target=lambda: (go.wait(), print('from a thread')))\nlate.start()\nprint('started')"
    )
    assert kernel.run("%%remote worker1\ngo.set()\nlate.join()").text == "from a thread\n"


def test_output_of_calls_is_in_the_cell_that_waits_for_them(kernel):
    reply = kernel.run("cluster.rpc_sync('worker1', print, ('called',))\nprint('over')")
    assert reply.text == "[worker1] called\nover\n"
    reply = kernel.run("print(list(cluster.map(print, ['of a map'], workers='worker2')))")
    assert reply.text == "[worker2] of a map\n[None]\n"
    assert "called" in kernel.run("%cluster logs worker1").text


def test_what_cannot_travel_is_named(kernel):
    kernel.run("lock = __import__('threading').Lock()")
    reply = kernel.run("%%remote worker1 -i lock\nprint('ran')")
    assert reply.ename == "SerializationError"
    assert "variables['lock']" in reply.traceback
    assert reply.text == ""
    assert kernel.run("%%remote worker1 -o gone\n1").ename == "NameError"
    assert "['gate']" in kernel.run("%%remote worker1 -o gate\nimport threading\ngate = threading.Lock()").traceback


def test_variables_in_the_line_of_a_cell_magic_are_expanded(kernel):
    kernel.run("w, n, line = 'worker2', 1, 'worker1'")
    ask = "import rpcbench.rpc as rpc\nrpc.get_worker_info().name"
    for words in ("{w}", "$w", "worker{n + 1}", "--label {w}"):
        reply = kernel.run(f"%%remote {words}\n{ask}")
        assert "worker2" in reply.text + str(reply.results), reply.traceback
    assert "worker1" in str(kernel.run(f"%%remote {{line}}\n{ask}").results)
    assert kernel.run("print('%remote worker1 f\"{40 + 2}\"')\n%remote worker1 f'{40 + 2}'").results == [
        {"text/plain": "'42'"}
    ]
    kernel.run("del w, n, line")


def test_an_unknown_worker_is_named_with_those_there_are(kernel):
    reply = kernel.run("%%remote worker9\n1")
    assert reply.ename == "UnknownWorkerError"
    assert "name worker9" in reply.traceback
    assert "worker1, worker2" in reply.traceback


def test_redirections_hold_for_remote_output(kernel):
    kernel.run("%%capture caught\nget_ipython().run_cell_magic('remote', 'worker1', 'print(7)\\n8')")
    assert kernel.value("caught.stdout, len(caught.outputs)") == r"('7\n', 1)"


def test_a_panel_is_shown_by_name(kernel):
    assert "application/vnd.jupyter.widget-view+json" in kernel.run("%panel rrefs").results[0]
    assert "say which panel to show: workers, " in kernel.run("%panel nope").text
    assert "this notebook has no result in a variable of that name" in kernel.run("%panel plan layouts").text
    kernel.run("text = 'no result'")
    refused = kernel.run("%panel rrefs text").evalue
    assert refused.startswith("this panel does not show 'no result': it shows the current cluster")
    assert "`%panel plan NAME` show the result of rpcbench.plan" in kernel.run("%panel plan").evalue


PLANNED = """\
import torch, rpcbench
def program(mesh):
    return lambda: torch.nn.Linear(32, 32)(torch.ones(64 // mesh["dp"].size(), 32)).sum().backward()
layouts = rpcbench.plan(program, 2, "a100", dimensions=["dp"])
layouts"""


def test_a_plan_is_a_panel_as_the_last_line_and_by_its_name(kernel):
    widget = "application/vnd.jupyter.widget-view+json"
    drawn = [each["text/plain"] for each in kernel.run(PLANNED).results if widget in each]
    assert any("\ndp 2  " in text for text in drawn), "beside a bar of the progress"
    assert widget in kernel.run("%panel plan layouts").results[0]
    kernel.run("world = layouts.best")
    assert "This world has no pipeline" in kernel.run("%panel pipeline world").results[0]["text/plain"]
    shown = kernel.run("%panel shards world").results[0]["text/plain"]
    assert shown.startswith("2 members, 1 watched model"), "of the notebook, and no variable of the workers"


def test_the_sharding_panel_watches_a_variable_of_the_workers(kernel):
    assert kernel.run("%%remote all\nimport torch\nlayer = torch.nn.Linear(4, 2)").status == "ok"
    shown = kernel.run("%panel shards layer")
    assert "application/vnd.jupyter.widget-view+json" in shown.results[0] and not shown.text
    kernel.run("import rpcbench\nseen = rpcbench.shards('layer')")
    assert "weight float32 [2, 4], plain copies: worker1 all of it; worker2 all of it" in kernel.run("print(seen)").text
    failed = kernel.run("%panel shards torch")
    assert failed.evalue == "no worker has a model torch: on worker1 torch is no model but a module"
    assert kernel.run("%%remote all\ndel layer").status == "ok"


COMPARED = """\
import torch
def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)
def step(model):
    loss = model(torch.ones(3, 4)).sum()
    loss.backward()
    return loss
"""


def test_a_report_of_a_comparison_is_drawn(kernel):
    kernel.run(COMPARED)
    shown = kernel.run("cluster.compare(reference=(make_model, step), parallel=(make_model, step))")
    (live, still), widget = shown.results, "application/vnd.jupyter.widget-view+json"
    assert widget in live and live["text/plain"].startswith("Right: the ranks (rank=2) compute what one process")
    assert "<svg" in base64.b64decode(re.search('base64,([^"]+)', still["text/html"])[1]).decode()
    assert widget in kernel.run("%panel compare").results[0] and not shown.text


def test_starting_again_is_harmless(kernel):
    assert "2 workers: worker1, worker2" in kernel.run("%cluster start 2").text
    assert "%cluster scale 3" in kernel.run("%cluster start 3").text


def test_a_variable_stays_there_and_an_rref_of_it_comes(kernel):
    assert kernel.run("%%remote all --rref big\nimport torch\nbig = torch.ones(3)").status == "ok"
    assert kernel.value("[(r.owner_name(), r.to_here().sum().item()) for r in big.values()]") == str(
        [("worker1", 3.0), ("worker2", 3.0)]
    )
    kernel.run("%%remote worker1\nbig.add_(1)")
    assert kernel.value("big['worker1'].to_here()") == "tensor([2., 2., 2.])", "the very object, not a copy"
    assert kernel.run("del big").status == "ok"


LATE = """import math, time
import rpcbench.cells.client as desk
finish = desk._WorkerRun.wait_with_prompts
def finish_late(part, deadline):
    in_time = part.member.name in {}
    part.output_buffer.begun.wait(60)
    return finish(part, math.inf if in_time else time.monotonic())
desk._WorkerRun.wait_with_prompts = finish_late"""
"""Lets the deadline of cells pass when they have shown something, except for these workers."""


def test_a_cell_that_takes_too_long_is_interrupted_and_shows_where_it_stood(kernel):
    kernel.run(LATE.format("()"))
    reply = kernel.run(f"%%remote worker1 --timeout 0.5\n{SLEEP}")
    kernel.run("desk._WorkerRun.wait_with_prompts = finish")
    assert (reply.status, reply.ename) == ("error", "RpcTimeoutError")
    assert re.search(AT, reply.traceback)
    assert "the cell ran for more than 0.5 s and was interrupted" in reply.traceback
    assert kernel.run("%%remote all --timeout 30\n1").status == "ok"


def test_errors_of_calls_show_no_frames_of_the_machinery(kernel):
    call = "rpc.rpc_sync('worker1', boom)"
    failed = kernel.run(f"from rpcbench import rpc\ndef boom():\n    return 1 / 0\n{call}")
    assert failed.ename == "ZeroDivisionError"
    assert call in failed.traceback and "return 1 / 0" in failed.traceback
    assert "api.py" not in failed.traceback and "core.py" not in failed.traceback
    refused = kernel.run("import rpcbench\nrpcbench.Cluster(0)")
    assert refused.ename == "ValueError" and "cluster.py" in refused.traceback, "what workers did not raise shows where"


def test_values_of_those_in_time_are_kept_when_another_is_late(kernel):
    code = "import rpcbench.rpc, time\nx = rpcbench.rpc.get_worker_info().name"
    loop = "print('ready')\nwhile x == 'worker2':\n    time.sleep(0.01)"
    kernel.run(LATE.format("('worker1',)"))
    assert kernel.run(f"%%remote all -o x --timeout 0.5\n{code}\n{loop}").ename == "RpcTimeoutError"
    kernel.run("desk._WorkerRun.wait_with_prompts = finish")
    assert kernel.value("x") == "{'worker1': 'worker1'}"


def _until(path):
    """Code that waits for a file."""
    return f"import pathlib, time\nwhile not pathlib.Path({str(path)!r}).exists():\n    time.sleep(0.01)\n"


def _shown(strays):
    return [m for m in strays if m["msg_type"] in SHOWN]


def test_a_cell_runs_while_the_notebook_goes_on_and_shows_all_where_it_began(kernel, tmp_path):
    begun = kernel.run(f"%%remote worker1 --async -o seven\n{_until(tmp_path / 'go')}print('late')\nseven = 7")
    assert (begun.status, begun.text) == ("ok", "")
    assert begun.results[0]["text/plain"].startswith("<cell on worker1: begun; at ")
    assert kernel.run("handle = _\nprint('seven' in globals(), handle.done)").text == "False False\n"
    assert kernel.run("%%remote worker2\nprint('meanwhile')").text == "meanwhile\n"
    (tmp_path / "go").touch()
    waited = kernel.run("print(handle.wait(), seven, handle.done)")
    assert waited.text == "{'seven': 7} 7 True\n"
    shown = _shown(waited.strays)
    # A worker's reply and its output come by different ways: either may be shown first.
    texts, states = ([m for m in shown if (m["msg_type"] == "stream") == text] for text in (True, False))
    assert "".join(m["content"]["text"] for m in texts) == "late\n"
    assert {m["msg_type"] for m in states} == {"update_display_data"}
    assert states[-1]["content"]["data"]["text/plain"].startswith("<cell on worker1: done; ")
    assert len({m["parent_header"]["msg_id"] for m in shown}) == 1, "the cell that began it"
    assert kernel.value("await handle") == "{'seven': 7}"


def test_the_error_of_a_cell_that_nobody_waits_for_is_shown_and_kept(kernel):
    begun = kernel.run("%%remote worker1 --async\n1 / 0")
    told = kernel.run("handle = _\ntry:\n    handle.wait()\nexcept ZeroDivisionError as error:\n    print('kept')")
    assert told.text == "kept\n"
    late = "".join(m["content"]["text"] for m in _shown(told.strays) if m["msg_type"] == "stream")
    texts = begun.text + late  # it may fail before the cell that began it is through
    assert "ZeroDivisionError" in texts
    assert "1 / 0" in re.sub(r"\x1b\[[0-9;]*m", "", texts)
    assert kernel.run("handle.wait()").ename == "ZeroDivisionError"


def test_a_cell_that_runs_beside_is_cancelled_by_its_handle_alone(kernel):
    kernel.run(f"%%remote all --async\n{SLEEP}")
    waited = kernel.run("handle = _\nprint('waiting')\nhandle.wait()", stop_at=[["waiting"]])
    assert waited.ename == "KeyboardInterrupt"
    assert kernel.value("handle.done") == "False"
    cancelled = kernel.run("handle.cancel()\nhandle.wait()")
    assert cancelled.ename == "CallCancelled"
    assert kernel.value("handle").startswith("<cell on worker1: CallCancelled, worker2: CallCancelled; ")


def test_waiting_here_and_not_waiting_there_is_refused(kernel):
    assert "take one of them" in kernel.run("%%remote worker1 --async --local\n1").text


def test_a_cell_runs_there_and_then_here(kernel):
    kernel.run("here = True")
    kernel.run("%%remote worker1 --local\nimport os\nboth = os.getpid()\nprint('ran')")
    assert kernel.value("__import__('os').getpid() == both") == "True"
    assert kernel.value("%remote worker1 both == os.getpid()") == "True"
    failed = kernel.run("%%remote worker1 --local\nif 'here' in globals():\n    1 / 0")
    assert (failed.status, failed.ename) == ("error", "ZeroDivisionError")
    assert failed.traceback.count("ZeroDivisionError") <= 2, "told once"


def test_cells_go_to_a_worker_and_say_so_until_that_is_switched_off(kernel):
    assert "until %autoremote off" in kernel.run("%autoremote worker2").text
    try:
        assert kernel.run("only_there = 7\nprint('here I am')").text == "[worker2] here I am\n"
        assert kernel.run("only_there + 1").text == "[worker2] 8\n"
        assert "1 / 0" in kernel.run("1 / 0").traceback
        assert "on worker2" in kernel.run("%autoremote").text
    finally:
        kernel.run("%autoremote off")
    assert kernel.value("'only_there' in globals()") == "False"
    assert kernel.run("%autoremote worker9").ename == "UnknownWorkerError"


@kernel_is_long
def test_the_cluster_grows_and_shrinks_and_tells_how_it_is(kernel):
    assert "3 workers" in kernel.run("%cluster scale 3").text
    kernel.run("%cluster group rest [1:]")
    assert sorted(kernel.run("%%remote rest\nprint('in')").text.splitlines()) == ["[worker2] in", "[worker3] in"]
    table = kernel.run("%cluster status").results[0]
    assert table["text/plain"].count("ready") == 3
    assert "<table>" in table["text/html"]
    assert "2 workers" in kernel.run("%cluster scale 2").text
    assert kernel.run("%%remote rest\nprint('in')").text.splitlines() == ["in"]
    before = kernel.value("cluster.pid('worker2')")
    assert "Started again: worker2" in kernel.run("%cluster restart worker2").text
    assert kernel.value("cluster.pid('worker2')") != before
    kernel.run("%%remote worker2\nimport os\n_ = os.write(2, b'past all cells\\n')")
    assert "[worker2] past all cells" in kernel.run("%cluster logs worker2").text


LOST = "import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("line", "end", "told"),
    [
        ("all", LOST, r"\[worker2\] WorkerLostError: worker2 .*SIGKILL.*\n.*variables are lost.*\n"),
        ("all --collapse", "1 / 0", r"\[worker2\] ZeroDivisionError: division by zero\n"),
        ("worker1 worker2 --tabs", "raise SystemExit(3)", r"\[worker2\] CallCancelled: .*SystemExit\n"),
    ],
)
def test_a_failure_is_told_while_others_run_and_their_results_are_kept(kernel, tmp_path, line, end, told):
    mine = f"if get_ipython().compile.worker == 'worker2':\n    {end}"
    code = f"%%remote {line} -o x\nx = 1\n{mine}\n{_until(tmp_path / 'go')}"
    cell = kernel.client.execute(code, stop_on_error=False)
    text, wanted, deadline = "", f"{told}The cell still runs on worker1.\n", time.monotonic() + PATIENCE
    while not re.search(wanted, text, re.DOTALL):
        assert time.monotonic() < deadline, text
        with contextlib.suppress(queue.Empty):
            message = kernel.client.get_iopub_msg(timeout=1)
            text += message["content"].get("text", "") if message["parent_header"]["msg_id"] == cell else ""
    (tmp_path / "go").touch()
    reply = kernel.answer(cell)
    assert reply["ename"] == re.search(r"(\w+):", told)[1]
    assert kernel.value("x") == "{'worker1': 1}"
    if end == LOST:
        assert "worker2 was lost before this cell had finished" in "\n".join(reply["traceback"])
        assert kernel.run("cluster.restart('worker2')").status == "ok"
