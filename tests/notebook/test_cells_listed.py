"""The table of cells in a real kernel: those of the notebook and of workers, each once, with their prompts."""

from __future__ import annotations

import ast

HERE = """
from rpcbench.runtime.current import current_agent
def listed(last):
    rows = sorted(current_agent().tables()["cells"].values(), key=lambda row: row["order"])[-last:]
    return [(row["code"].strip(), [part[1:4] for part in row["parts"]], row["number"]) for row in rows]
"""


def value(kernel, code):
    reply = kernel.run(code)
    assert reply.status == "ok", reply.traceback
    return ast.literal_eval(reply.results[-1]["text/plain"])


def test_each_cell_is_listed_once_where_it_ran(kernel):
    assert kernel.run(HERE).status == "ok"
    kernel.run("plain = 1")
    kernel.run("%%remote worker1\nx = 1\nx")
    kernel.run("1 / 0")
    kernel.run("%%remote worker1\nmissing")
    kernel.run("here = 2\nthere = %remote worker2 6 * 7")
    *rows, last = value(kernel, "listed(7)")
    number = rows[0][2]
    assert rows == [
        ("plain = 1", [["notebook", "ok", ""]], number),
        ("x = 1\nx", [["worker1", "ok", ""]], number + 1),
        ("1 / 0", [["notebook", "error", "ZeroDivisionError: division by zero"]], number + 2),
        ("missing", [["worker1", "error", "NameError: name 'missing' is not defined"]], number + 3),
        ("here = 2\nthere = %remote worker2 6 * 7", [["notebook", "ok", ""]], number + 4),
        ("6 * 7", [["worker2", "ok", ""]], number + 4),
    ]
    assert last[:2] == ("listed(7)", [["notebook", "runs", ""]])


def test_the_notebook_says_of_itself_that_it_runs_a_cell(kernel):
    """And is idle once the cell has ended."""
    kernel.run(HERE + "from rpcbench.runtime.publisher import Health\nhealth = current_agent().part(Health)")
    assert value(kernel, "health.count_cells()") == 1
    look = "lambda result: seen.append(health.count_cells())"
    kernel.run(f"seen, shell = [], get_ipython()\nshell.events.register('post_run_cell', {look})")
    kernel.run("%%remote worker1\nx = 1")
    assert value(kernel, "seen[-1]") == 0
    kernel.run("shell.events.callbacks['post_run_cell'].pop()")


def test_of_two_clusters_a_cell_is_listed_in_its_own_alone(kernel):
    assert kernel.run("main = cluster\n%cluster start 1 --name other").status == "ok"
    kernel.run("%%remote all\nx = 5")
    listed = "[row['code'] for row in each.agent.tables()['cells'].values() if row['code'].endswith('x = 5')]"
    assert value(kernel, f"[{listed} for each in (main, cluster)]") == [[], ["x = 5"]]
    assert kernel.run("%cluster stop").status == "ok"
    assert kernel.run("assert cluster is main\ndel main").status == "ok"


def test_a_background_cell_and_an_interrupted_one(kernel):
    assert kernel.run(HERE).status == "ok"
    kernel.run("%%remote worker1 --async\nbackground = 1")
    kernel.run("_.wait()")
    both = ["[worker1] runs", "[worker2] runs"]
    kernel.run("%%remote all\nprint('runs')\nimport time\ntime.sleep(60)", stop_at=[both])
    background, _, stopped, _ = value(kernel, "listed(4)")  # and the two cells here
    assert background[:2] == ("background = 1", [["worker1", "ok", ""]])
    assert stopped[1] == [["worker1", "interrupted", ""], ["worker2", "interrupted", ""]]


def test_code_that_no_user_has_written_has_no_row(kernel):
    assert kernel.run(HERE).status == "ok"
    assert kernel.run("%%remote all\nimport torch\nlayer = torch.nn.Linear(4, 2)").status == "ok"
    kernel.run("%panel shards layer")
    codes = [code for code, *_ in value(kernel, "listed(3)")]
    assert codes == ["import torch\nlayer = torch.nn.Linear(4, 2)", "%panel shards layer", "listed(3)"]
    assert kernel.run("%%remote all\ndel layer").status == "ok"


def test_a_cell_of_step_runs_until_its_code_has_ended(kernel):
    assert kernel.run(HERE + "import rpcbench").status == "ok"
    kernel.run("%%step\nrpcbench.rpc.rpc_sync('worker1', abs, args=(-3,))")
    step, last = value(kernel, "listed(2)")
    assert step[1] == [["notebook", "runs", ""]] and last[1] == [["notebook", "runs", ""]]
    kernel.run("from rpcbench.testing.stepper import Stepper\nfrom rpcbench.runtime.current import current_agent\n"
               "stepper = Stepper.present(current_agent())\nstepper.go()\nstepper.cell.wait(20)")  # fmt: skip
    assert value(kernel, "listed(3)")[0][1] == [["notebook", "ok", ""]]
