"""Parts of variables, and a function on all ranks, in a real kernel: what a user sees."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.process


def test_each_worker_gets_a_part_and_the_results_are_joined(kernel):
    kernel.run("import torch\nx = torch.arange(5)")
    reply = kernel.run("%%remote all -i x:scatter -o y:cat,n:list\ny, n = x * 2, len(x)")
    assert (reply.status, reply.text) == ("ok", "x: 5 rows as 3, 2\n")
    assert kernel.value("(y, n)") == "(tensor([0, 2, 4, 6, 8]), [3, 2])"
    assert kernel.value("cluster['worker2']['x']") == "tensor([3, 4])"
    kernel.run("%%remote all --async -i x:scatter -o y:sum\ny = x.sum()")
    assert kernel.run("_.wait()").status == "ok" and kernel.value("y") == "tensor(10)"


def test_values_that_do_not_fit_are_told_in_a_line_and_kept(kernel):
    reply = kernel.run("%%remote all -o y:cat\nimport os, torch\ny = torch.ones(1, 1 + int(os.environ['RANK']))")
    assert reply.ename == "UsageError"
    assert kernel.value("sorted(y)") == "['worker1', 'worker2']"
    told = kernel.run("%%remote all -i y:scatter\n1")
    assert "-i y:scatter: y has type dict: only a tensor, an array or a sequence can be split" in told.text


def test_a_wrong_name_of_a_variable_shows_no_frames_of_the_machinery(kernel):
    kernel.run("cluster['worker1']['model'] = 1")
    reply = kernel.run("cluster['worker1']['modle']")
    assert reply.ename == "UnknownVariableError" and "rpcbench/" not in reply.traceback
    assert reply.evalue.startswith("worker1 has no variable 'modle': did you mean model? There are ")
    assert kernel.value("cluster['worker1']").splitlines()[0] == "worker1 has:"


TRAIN = """
import time
import torch.distributed as dist

def train(fails):
    print("rank", dist.get_rank())
    if dist.get_rank() == fails:
        raise ValueError("no data")
    while fails >= 0:
        time.sleep(0.01)
    return dist.get_world_size()
"""


def test_a_function_of_the_notebook_runs_on_all_ranks(kernel):
    reply = kernel.run(TRAIN + "\ncluster.spmd(train, -1)")
    assert sorted(reply.text.splitlines()) == ["[worker1] rank 0", "[worker2] rank 1"]
    assert reply.results[-1]["text/plain"] == "[2, 2]"


def test_the_rank_that_fails_shows_where_and_the_others_one_line(kernel):
    reply = kernel.run(TRAIN + "\ncluster.spmd(train, 1)")
    assert (reply.ename, reply.evalue) == ("ValueError", "no data")
    assert "----> 1 _spmd = _spmd()  # train" in reply.traceback and "rpcbench/" not in reply.traceback
    ended = "RankFailedError: rank 1 (worker2) failed in train: ValueError: no data"
    assert reply.traceback.endswith(f"[worker1] {ended}")
    assert kernel.run("cluster.spmd(train, -1)").status == "ok"


def test_the_stop_button_ends_all_ranks(kernel):
    reply = kernel.run(TRAIN + "\ncluster.spmd(train, 7)", stop_at=[["rank 0", "rank 1"]])
    assert reply.ename == "KeyboardInterrupt" and "still runs" not in reply.traceback
    assert kernel.run("cluster.spmd(train, -1)").status == "ok"
