"""Workers that a command starts on hosts: here on this host under other names, over TLS on loopback."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import secrets
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from far_commands import provide
from launch_bench import gone, until
from sizes import long
from worlds import far_world

import rpcbench
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError, ShutdownError, WorkerLostError
from rpcbench.cells.runner import Cell, CellRunner, run_cell
from rpcbench.cells.worker_log import read_last_lines
from rpcbench.launch import environment, start_errors, supervisor
from rpcbench.launch.base import ProcessHandle
from rpcbench.launch.command import CommandLauncher, _Command
from rpcbench.launch.fork_client import ForkServerClient
from rpcbench.runtime.current import current_agent
from rpcbench.transport.hosts import host_id
from rpcbench.transport.preambles import PREAMBLE, WELCOME
from rpcbench.transport.run_dir import RunDirectory

pytestmark = pytest.mark.process

SRUN = "srun -w {host} -N1 -n1 {cmd}"
HERE = "127.0.0.1"
PATIENCE = 40.0  # seconds: enough for a worker to join on a busy machine


def started(n: int = 1, template: str = SRUN, hosts: str = "h1,h2", **options: Any) -> rpcbench.Cluster:
    return rpcbench.Cluster(
        n, launcher="command", options={"template": template, "hosts": hosts, **options}, address=HERE
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpcbench.Cluster]:
    """Three workers on two hosts."""
    with pytest.MonkeyPatch.context() as patch:
        provide(tmp_path_factory.mktemp("bin"), patch.setenv, ["h1", "h2"])
        patch.setenv("OMP_NUM_THREADS", "2")
        with started(3) as made:
            yield made


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provide(tmp_path, monkeypatch.setenv, ["h1", "h2"])


# -- workers on other hosts
def test_workers_take_the_hosts_in_turn_and_connect_over_tls(cluster: rpcbench.Cluster) -> None:
    assert cluster.kind == "command"
    hosts = cluster.run("all", "import os\nos.environ['RPCBENCH_HOST_ID']")
    assert hosts == {"worker1": "h1", "worker2": "h2", "worker3": "h1"}
    members = cluster.agent.machine.read_node(lambda node: list(node.members.members.values()))
    assert all(member.remote.startswith(f"tls://{HERE}:") for member in members)
    assert cluster.rpc_sync("worker1", rpcbench.rpc.rpc_sync, ("worker2", max, (8, 9))) == 9
    big = torch.arange(1 << 20)
    assert torch.equal(cluster.rpc_sync("worker2", torch.neg, (big,)), -big)


def test_a_worker_has_the_directory_path_and_thread_count_of_the_notebook(cluster: rpcbench.Cluster) -> None:
    code = "import os, sys, torch\n(os.getcwd(), sys.path, torch.get_num_threads(), torch.rand(1).item())"
    found = cluster.run("all", code)
    cwd, path, threads, _ = found["worker1"]
    assert cwd == os.getcwd() and threads == 2
    own = [entry for entry in sys.path if not environment.is_installed(entry) and Path(entry or ".").exists()]
    assert path[: len(own)] == own
    assert len({drawn for *_, drawn in found.values()}) == 3, "each worker draws another number"


def test_status_reports_the_host_and_the_process_id_of_each_worker(cluster: rpcbench.Cluster) -> None:
    code = "import os, socket\n(os.getpid(), socket.gethostname())"
    there = cluster.run("all", code)
    rows = cluster.status()
    assert {row.name: (row.pid, row.host) for row in rows} == there
    assert {row.state for row in rows} == {"ready"} and "?" in repr(rows)
    assert cluster.pid("worker2") == there["worker2"][0]


def test_no_command_line_or_environment_shows_the_secret(cluster: rpcbench.Cluster) -> None:
    secret = cluster._config.secret.hex()
    worker = psutil.Process(cluster.pid("worker1"))
    for process in (worker, *worker.parents()):
        assert secret not in " ".join(process.cmdline())
    assert secret not in json.dumps(worker.environ()) and secret not in json.dumps(worker.parent().environ())
    assert secret not in cluster.log("worker1")


def test_output_of_a_worker_outside_cells_is_in_its_log(cluster: rpcbench.Cluster) -> None:
    cluster.run("worker2", "import os\n_ = os.write(2, b'from afar\\n')")
    until(lambda: "from afar" in cluster.log("worker2"))


_interrupts: list[None] = []


def count_interrupts() -> None:
    """On a worker: count its interrupts from now on."""
    runner = current_agent().part(CellRunner)
    interrupt_main_thread = runner.interrupt_main_thread
    runner.interrupt_main_thread = lambda: [interrupt_main_thread(), _interrupts.append(None)]


def interrupts() -> int:
    return len(_interrupts)


def test_an_interrupt_reaches_the_main_thread_of_the_worker(cluster: rpcbench.Cluster, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shown = threading.Thread(target=lambda: (until(runs.exists), cluster.interrupt("worker3")))
    shown.start()
    touch = f"import pathlib, time\npathlib.Path({str(runs)!r}).touch()"
    with pytest.raises(KeyboardInterrupt):
        cluster.run("worker3", f"{touch}\nfor _ in range(2000):\n    time.sleep(0.05)")
    shown.join()
    cluster.rpc_sync("worker3", count_interrupts)
    cluster.interrupt("worker3")  # the worker is idle
    until(lambda: cluster.rpc_sync("worker3", interrupts) == 1)
    assert cluster.run("worker3", "6 * 7") == 42


def test_ranks_meet_at_the_first_worker(cluster: rpcbench.Cluster) -> None:
    code = "import os, torch\nimport rpcbench.distributed as dist\ndist.init_process_group('gloo')\n"
    code += "x = torch.ones(2) * (dist.get_rank() + 1)\ndist.all_reduce(x)\n"
    asked = "(x.tolist(), *(os.environ[name] for name in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')))"
    found = cluster.run("all", f"{code}found = {asked}\ndist.destroy_process_group()\nfound")
    assert [each[0] for each in found.values()] == [[6.0, 6.0]] * 3
    assert [each[1:] for each in found.values()] == [("0", "2", HERE), ("0", "1", HERE), ("1", "2", HERE)]


def test_a_killed_worker_is_reported_as_lost_and_can_be_restarted(cluster: rpcbench.Cluster) -> None:
    before = cluster.pid("worker1")
    cluster.kill("worker1")
    assert cluster.lost == ["worker1"]
    until(lambda: gone(before))
    until(lambda: cluster.status()[0].state == "killed by SIGKILL")
    cluster.restart("worker1")
    assert cluster.pid("worker1") != before and cluster.status()[0].incarnation == 1
    assert cluster.run("worker1", "1 + 1") == 2


def test_the_loss_of_a_worker_is_reported_with_its_status_and_output(cluster: rpcbench.Cluster) -> None:
    with pytest.raises(WorkerLostError, match=r"exit code 3"):
        cluster.run("worker2", "import os\nos._exit(3)")
    with pytest.raises(WorkerLostError, match=r"(?s)killed by SIGSEGV.*Segmentation fault"):
        cluster.run("worker3", "import os\nos.kill(os.getpid(), 11)")
    cluster.restart("worker2")
    cluster.restart("worker3")


@pytest.mark.long
def test_scale_and_shutdown_leave_no_process_behind(no_leaks: None, srun: None) -> None:
    with started(1) as made:
        child = made.run("worker1", "import subprocess\nsubprocess.Popen(['sleep', '600']).pid")
        made.scale(2)
        made.scale(1)
        assert made.workers == ["worker1"] and not gone(child)
    until(lambda: gone(child))


NOTEBOOK = """
import sys, rpcbench
made = rpcbench.Cluster(2, launcher="command", options={"template": sys.argv[1], "hosts": "h1,h2"}, address="127.0.0.1")
child = made.run("worker1", "import subprocess\\nsubprocess.Popen(['sleep', '600']).pid")
made.rpc_async("worker2", exec, ("import ctypes\\nctypes.PyDLL(None).sleep(600)",))  # and holds Python's lock
print(child, made.pid("worker1"), made.pid("worker2"), flush=True)
sys.stdin.read()
"""


def test_a_killed_notebook_leaves_no_process_behind(no_leaks: None, srun: None) -> None:
    with subprocess.Popen([sys.executable, "-c", NOTEBOOK, SRUN], stdin=-1, stdout=-1, text=True) as notebook:
        try:
            assert notebook.stdout is not None
            pids = [int(pid) for pid in notebook.stdout.readline().split()]
        finally:
            notebook.kill()
    assert len(pids) == 3
    until(lambda: all(map(gone, pids)))


# -- failed launches
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"hosts": "h7"},
            r"^the command that starts worker1 on h7 ended \(exit code 1\) before worker1 could serve:\n"
            r"srun: error: Unable to reach h7: no such node\nThe command: srun -w h7 -N1 -n1 .* worker1$",
        ),
        ({"python": "python0.4"}, r"exit code 127\).*python0\.4.*No such file"),
        ({"template": "srum -w {host} {cmd}"}, r"could not be launched by srum -w h1 .*No such file.*srum"),
        ({"template": "srun -w {host} true {cmd}"}, r"exit code 0\) before worker1 could serve, and wrote no output\n"),
        ({"template": "srun -w {host} false {cmd}", "hosts": "h1"}, r"The command: srun -w h1 false .* worker1$"),
        (
            {"template": 'sh -c "echo No module named rpcbench; exit 1" {cmd} {host}'},
            r"Install rpcbench there, or name an interpreter that has it: python=PATH\.$",
        ),
        ({"template": "sh -c '{cmd} < /dev/null' {host}"}, "must forward standard input"),
    ],
)
def test_the_error_of_a_failed_launch_quotes_its_output(
    no_leaks: None, srun: None, options: dict[str, str], words: str
) -> None:
    with pytest.raises(RpcError, match=f"(?s){words}"):
        started(**{"hosts": "h1", **options})


@pytest.mark.parametrize(
    ("template", "hosts", "words"),
    [
        ("ssh {host}", "a", "has no {cmd}"),
        ("ssh {hots} {cmd}", "a", r"unknown field {hots}; there are {cmd}, {host}, {name}, {python}"),
        ("ssh {host:>9} {cmd}", "a", "unknown field {host}"),
        ("ssh {} {cmd}", "a", "unknown field {}"),
        ("ssh {host} {cmd}", "", r"names a {host}: pass hosts="),
        ("bash -c '{cmd}'", "a b", "has no {host}, but hosts="),
        ("ssh 'a {host} {cmd}", "a", "is not a command: No closing quotation"),
        ("ssh {host {cmd}", "a", "is not a command"),
        ("ssh {host} {cmd}", "-oProxyCommand=x", "'-oProxyCommand=x' is not a host name"),
        ("ssh {host} {quoted_cmd}", "a", "unknown field {quoted_cmd}"),
        ("srun -w {host} bash -lc {cmd}", "a", "bash -lc would get only the first .*: write bash -lc '{cmd}'"),
        ("ssh {host} bash -lc '{cmd}'", "a", "bash -lc would get only the first .*: write \"bash -lc '{cmd}'\""),
        ("ssh {host} bash -lc {cmd}", "a", "bash -lc would get only the first .*: write \"bash -lc '{cmd}'\""),
    ],
)
def test_an_invalid_template_is_refused(template: str, hosts: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("{", r"\{").replace("}", r"\}")):
        CommandLauncher(RunDirectory(), template, hosts)


def test_fields_of_a_template_can_be_words_or_parts_of_words() -> None:
    launcher = CommandLauncher(RunDirectory(), "sh -c 'cd /; exec {cmd}' x-{host} {name}", ["a", "b"], "/my python")
    config = WorldConfig("worker4", 4, "c", "/", bytes(32))
    assert launcher._make_argv(config) == [
        "sh", "-c", "cd /; exec '/my python' -P -m rpcbench.worker worker4", "x-b", "worker4"
    ]  # fmt: skip
    command = "'/my python' -P -m rpcbench.worker worker4"
    for template, words in (
        ("bash -lc '{cmd}'", ["bash", "-lc", command]),
        ('bash -lc "{cmd}" x', ["bash", "-lc", command, "x"]),
        ("ssh x \"bash -lc '{cmd}'\"", ["ssh", "x", f"bash -lc {shlex.quote(command)}"]),
        ("ssh x '{cmd}'", ["ssh", "x", command]),
    ):
        assert CommandLauncher(RunDirectory(), template, (), "/my python")._make_argv(config) == words
    plain = CommandLauncher(RunDirectory(), "env {cmd}", (), "/my python")
    assert plain._make_argv(config) == ["env", "/my python", "-P", "-m", "rpcbench.worker", "worker4"]


@pytest.mark.parametrize(
    "word", ["sh -c '{cmd}'", 'sh -c "{cmd}"', "true; sh -c 'cd /; {cmd}'", "echo 'a' \"'\" > /dev/null; sh -c '{cmd}'"]
)
def test_a_shell_within_a_shell_gets_the_path_of_an_interpreter_whole(tmp_path: Path, word: str) -> None:
    """As in `ssh {host} "bash -lc '{cmd}'"`: ssh hands its words to a shell."""
    python = tmp_path / 'my $HOME\'s "python"'
    python.write_text('#!/bin/sh\necho "$*"\n')
    python.chmod(0o700)
    launcher = CommandLauncher(RunDirectory(), f"ssh {shlex.quote(word)}", (), str(python))
    _, line = launcher._make_argv(WorldConfig("worker4", 4, "c", "/", bytes(32)))
    ran = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.stdout == "-P -m rpcbench.worker worker4\n"


# -- one command
def config(directory: RunDirectory, **changes: Any) -> WorldConfig:
    fields = {"leader": f"tls://{HERE}:9", "host": "nowhere", **changes}
    return WorldConfig("worker1", 1, "test", str(directory.path), secrets.token_bytes(32), **fields)


def test_a_command_that_ignores_its_input_and_interrupts_is_killed(no_leaks: None, tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("#!/bin/sh\ntrap '' TERM\nwhile true; do sleep 600; done\n")
    stubborn.chmod(0o755)
    ends: list[tuple[str, int]] = []
    directory = RunDirectory()
    launcher = CommandLauncher(directory, f"{stubborn} {{cmd}}")
    try:
        handle = launcher.start(config(directory), lambda handle, status: ends.append((handle.name, status)))
        handle.interrupt()
        with pytest.raises(TimeoutError):
            handle.wait(0.1)
        handle.kill()
        assert handle.wait(20) == -signal.SIGKILL
        until(lambda: ends == [("worker1", -signal.SIGKILL)])
        handle.kill()
    finally:
        launcher.close()
    launcher.close()
    with pytest.raises(ShutdownError, match="this launcher is closed"):
        launcher.start(config(directory))


QUEUE = """#!/bin/sh
[ $1 = worker1 ] && shift && exec "$@"
trap 'echo withdrawn > {note}; exit 1' TERM
echo 'srun: job 9 queued and waiting for resources' >&2
while true; do sleep 0.05; done
"""


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    """A command that waits in a queue for ever, but for worker1, and withdraws its request at SIGTERM, as srun does: it
    makes this file then."""
    note, path = tmp_path / "withdrawn", tmp_path / "queue"
    path.write_text(QUEUE.format(note=note))
    path.chmod(0o755)
    return note


def test_a_start_that_is_too_late_quotes_its_command_and_withdraws_it(
    no_leaks: None, queue: Path, tmp_path: Path
) -> None:
    options = {"template": f"{tmp_path / 'queue'} wait {{cmd}}"}
    with pytest.raises(RpcError) as told:
        rpcbench.Cluster(1, launcher="command", options=options, address=HERE, patience=1)
    first, state, quoted, advice = str(told.value).splitlines()
    assert first == "timed out after 1 s waiting for worker1 to join"
    assert state.startswith(f"worker1, which dials the notebook at tls://{HERE}:")
    assert re.search(r": its command still runs, .*/queue wait .* worker1; its last output:$", state)
    assert quoted == "  srun: job 9 queued and waiting for resources" and "--patience 300" in advice
    assert queue.exists()


@pytest.mark.parametrize(
    ("command", "allocation", "is_told"),
    [
        ("srun -w h1 -N1 -n1 python", "7", True),
        ("srun -w h1 -N1 -n1 --overlap python", "7", False),
        ("srun -N1 -n1 python", None, False),
        ("ssh h1 python", "7", False),
    ],
)
def test_a_step_that_may_wait_for_another_one_is_told_of_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, allocation: str | None, is_told: bool
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if allocation is not None:
        monkeypatch.setenv("SLURM_JOB_ID", allocation)
    handle = ProcessHandle("worker2", tmp_path / "log", lambda which: None, None)
    handle.command = command
    handle.process_created(1)
    assert ("srun --overlap shares it" in str(start_errors.late_start_error([handle], [], 60, ""))) is is_told


@pytest.mark.long
def test_a_start_that_is_too_late_names_only_the_missing_worker_with_its_host(
    no_leaks: None, srun: None, queue: Path, tmp_path: Path
) -> None:
    template = f"{tmp_path / 'queue'} {{name}} srun -w {{host}} -N1 -n1 {{cmd}}"
    with pytest.raises(RpcError) as told:
        rpcbench.Cluster(
            2, launcher="command", options={"template": template, "hosts": "h1,h2"}, address=HERE, patience=PATIENCE
        )
    first, state, *_ = str(told.value).splitlines()
    assert first == f"timed out after {PATIENCE:g} s waiting for worker2 to join (worker1 joined)"
    assert state.startswith("worker2 on h2, which dials the notebook at ")


def test_a_command_that_is_killed_is_not_taken_for_its_worker(no_leaks: None, srun: None) -> None:
    with started(1, "env RPCBENCH_HOST_ID=h1 setsid --wait {cmd}", "") as made:
        handle = made._handles["worker1"]
        waiting = made.rpc_async("worker1", time.sleep, (600,), timeout=0)
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match=r"the command that ran it ended \(killed by SIGKILL\)"):
            waiting.wait()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root and unshare")
def test_a_place_with_directories_of_its_own_is_another_host(no_leaks: None, tmp_path: Path) -> None:
    """As a container on its host's network. Workers in one such place share its directories."""
    box = tmp_path / "box"
    box.write_text('#!/bin/sh\nexec unshare -m sh -c \'mount -t tmpfs none /tmp; cd /; exec "$@"\' sh "$@"\n')
    box.chmod(0o755)
    with started(1, f"{box} {{cmd}}", "", python=sys.executable) as made:
        code = "import os\nfrom rpcbench.transport.hosts import host_id\n(host_id(), os.getcwd())"
        assert made.run("worker1", code)[0] != host_id()
        me = made.agent.machine.read_node(lambda node: node.members.members[1])
        assert me.host != host_id() and me.remote.startswith("tls://")
        assert torch.equal(made.rpc_sync("worker1", torch.neg, (torch.ones(3),)), -torch.ones(3))


def test_the_input_of_a_command_is_not_closed_during_a_write(no_leaks: None) -> None:
    """A descriptor that is closed during a write may belong to another file by then."""

    class Input:
        def write(self, line: bytes) -> None:
            ends = threading.Thread(target=command._hang_up)
            ends.start()
            said.append(closed.wait(0.3))  # it must stay open, so this wait always times out
            told.set()
            said.append(ends)

        def close(self) -> None:
            closed.set()
            assert told.is_set()

    said: list[Any] = []
    closed, told = threading.Event(), threading.Event()
    directory = RunDirectory()
    command = _Command(config(directory), ["true"], "", directory, None)
    command.wait_for_exit()
    command._process.stdin = Input()  # type: ignore[assignment]
    command.send_stdin_line(b"a secret")
    closed_meanwhile, ends = said
    ends.join(20)
    assert not closed_meanwhile and closed.is_set()
    directory.remove_directory()


def test_a_cluster_with_a_command_that_ends_at_once_fails(no_leaks: None) -> None:
    for _ in range(10):
        with pytest.raises(RpcError, match=r"the command that starts worker1 ended \(exit code 1\)"):
            started(1, "false {cmd}", "")


def test_an_interrupted_start_leaves_no_command_running(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(server: ForkServerClient, pid: int, grace: float) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    pids: list[int] = []
    directory = RunDirectory()
    launcher = CommandLauncher(directory, "env {cmd}")
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ForkServerClient, "guard", interrupted)
            launcher.start(config(directory))
        until(lambda: gone(pids[0]))
    finally:
        launcher.close()


# -- the supervisor that the command starts
def outposted(line: bytes, name: str = "worker1", stays: bool = False) -> tuple[int, str]:
    """The exit status and stderr of a supervisor with this input, which stays open until its end if `stays`."""
    command = [sys.executable, "-m", "rpcbench.worker", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(line)
        (process.stdin.flush if stays else process.stdin.close)()
        return process.wait(60), process.stderr.read().decode()


def test_a_supervisor_without_input_exits_with_the_reason(no_leaks: None) -> None:
    status, said = outposted(b"")
    assert status == 1 and said.count("\n") == 1 and "worker1 received no world to join" in said


def test_a_supervisor_that_cannot_reach_the_notebook_says_what_it_met(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((HERE, 0)) as free:
        leader = f"tls://{HERE}:{free.getsockname()[1]}"
    status, said = outposted(supervisor.supervisor_request(config(RunDirectory(), leader=leader)), stays=True)
    assert status == 1 and said.count("\n") == 1, said
    there = f"worker1, on host {socket.gethostname()}, cannot reach the notebook at {leader}"
    assert said.startswith(f"{there}: Connection refused.") and "in a notebook --address HOST:PORT" in said

    def dropped(place: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", dropped)
    with pytest.raises(RpcError, match=r"cannot reach the notebook at tls://127\.0\.0\.1:9: no answer in 10 s\. Let"):
        supervisor._check_reachable(config(RunDirectory()))


def test_a_supervisor_that_meets_another_service_names_its_address(no_leaks: None, tmp_path: Path) -> None:
    """For example behind a port that is forwarded to another world."""
    with far_world(tmp_path, 1) as (other,):
        leader = other.machine.read_node(lambda node: node.members.me.remote)
        status, said = outposted(supervisor.supervisor_request(config(RunDirectory(), leader=leader)), stays=True)
    assert status == 1 and f"at {leader}: another service answers, or a cluster with another secret." in said, said


@pytest.mark.parametrize("resets", [2, math.inf], ids=["for a time", "all the time"])
def test_a_supervisor_whose_connection_is_reset_tries_again(
    resets: float, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a notebook to which many connect; one that resets all connections is left to the worker, which waits."""
    monkeypatch.setattr(supervisor, "_REACH_SECONDS", PATIENCE if resets == 2 else 0.3)
    tries = list[None]()
    with socket.create_server((HERE, 0)) as server:

        def serve() -> None:
            while True:
                sock, _ = server.accept()
                with sock:
                    if not sock.recv(PREAMBLE, socket.MSG_WAITALL):
                        return
                    tries.append(None)
                    if len(tries) > resets:
                        sock.sendall(WELCOME)
                    else:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            supervisor._check_reachable(config(RunDirectory(), leader=f"tls://{HERE}:{server.getsockname()[1]}"))
        finally:
            socket.create_connection(server.getsockname()).close()
            serving.join(PATIENCE)
    assert tries if resets == math.inf else len(tries) == 3


def test_a_supervisor_loads_no_torch() -> None:
    code = "import sys\nimport rpcbench.launch.supervisor\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_supervisor_refuses_a_terminal_which_would_show_the_secret(no_leaks: None) -> None:
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-m", "rpcbench.worker", "worker1"]
        done = subprocess.run(command, stdin=theirs, capture_output=True, timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 1 and b"must not be a terminal" in done.stderr


TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


def test_a_terminal_that_echoes_the_secret_does_not_bring_it_into_an_error(no_leaks: None, tmp_path: Path) -> None:
    """As with `ssh -tt`: the request is in the command's log before the worker's supervisor refuses a terminal."""
    terminal, copy = tmp_path / "terminal.py", tmp_path / "log"
    terminal.write_text(TERMINAL)
    template = f"sh -c '{sys.executable} {terminal} {{cmd}} | tee {copy}'"
    with pytest.raises(RpcError, match=r"(?s)\(a terminal has echoed the request.*must not be a terminal") as told:
        started(1, template, "")
    assert 'secret\\": \\"' in copy.read_text(), "the terminal has echoed it"
    assert '"config"' not in str(told.value) and 'secret\\"' not in str(told.value)


def test_what_leaves_a_log_has_no_secret(tmp_path: Path) -> None:
    """Wherever the part that is read begins: at each byte of the secret, and before."""
    made, log = config(RunDirectory()), tmp_path / "log"
    secret, asked = made.secret.hex(), supervisor.supervisor_request(made)
    log.write_bytes(b"one\n" + asked + b"last\n")
    told = read_last_lines(log)
    assert told.startswith("one\n(a terminal has echoed the request") and told.endswith("\nlast")
    for start in range(asked.index(b"secret") - 2, asked.index(secret.encode()) + 64):
        log.write_bytes(asked + b"-" * ((1 << 14) - len(asked[start:]) - len("\nlast\n")) + b"\nlast\n")
        told = read_last_lines(log)
        assert not any(secret[at : at + 8] in told for at in range(57)) and told.endswith("last")


def test_a_supervisor_refuses_a_notebook_of_another_version(no_leaks: None) -> None:
    asked = json.loads(supervisor.supervisor_request(config(RunDirectory())))
    asked["versions"] = ["protocol 99", "Python 3.99"]
    status, said = outposted(json.dumps(asked).encode() + b"\n")
    assert status == 1 and "the notebook has protocol 99, Python 3.99" in said and "Traceback" not in said


def test_a_supervisor_ignores_directories_that_its_user_cannot_enter(no_leaks: None, tmp_path: Path) -> None:
    """On another host or in a container, the worker may run as another user than the notebook."""
    closed = tmp_path / "closed"
    (closed / "in").mkdir(parents=True)
    closed.chmod(0)
    asked = {"cwd": str(closed / "in"), "sys_path": [str(closed / "in"), "/"]}
    code = "import os\nfrom rpcbench.launch import supervisor\nos.geteuid() or os.setuid(65534)\n"
    code += f"print(supervisor._accessible_paths({asked}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
    closed.chmod(0o700)
    assert done.stdout == "('/', ['/'])\n", done.stderr


@pytest.mark.long
def test_a_worker_with_another_secret_is_refused(no_leaks: None, srun: None) -> None:
    with started(1) as made:
        leader = made.agent.machine.read_node(lambda node: node.members.me.remote)
        stranger = replace(made._config, name="worker9", id=9, leader=leader, remote="", secret=bytes(32), host="other")
        status, said = outposted(supervisor.supervisor_request(stranger), "worker9", stays=True)
        assert made.workers == ["worker1"]
    assert status == 1 and "another secret" in said, said


@pytest.mark.parametrize("code", ["while True: pass", *long("import ctypes\nctypes.CDLL(None).sleep(600)")])
def test_a_busy_worker_ends_with_its_world_even_if_its_command_goes_on(no_leaks: None, srun: None, code: str) -> None:
    """For example behind a cut cable."""
    with started(1) as made:
        worker = made.pid("worker1")
        cell = Cell(1, f"import sys\nprint('runs', file=sys.__stderr__, flush=True)\n{code}")
        made.rpc_async("worker1", run_cell, (cell,), timeout=0)
        until(lambda: "runs" in made.log("worker1"))
        made.agent.shutdown(graceful=False)
        until(lambda: gone(worker))


@pytest.mark.long
def test_a_signal_to_the_supervisor_ends_the_worker_with_that_signal(no_leaks: None, srun: None) -> None:
    """For example from `scancel`, or from a container that is stopped."""
    with started(1) as made:
        worker = made.pid("worker1")
        psutil.Process(worker).parent().terminate()
        until(lambda: made.lost == ["worker1"])
        assert gone(worker) and made.status()[0].state == "killed by SIGTERM"


def test_a_killed_supervisor_ends_its_worker(no_leaks: None, srun: None) -> None:
    with started(1) as made:
        worker = made.pid("worker1")
        directory = Path(
            made.run("worker1", "from rpcbench.runtime import current\ncurrent.current_agent().config.directory")
        )
        psutil.Process(worker).parent().kill()
        until(lambda: made.lost == ["worker1"] and gone(worker))
        for path in sorted(directory.rglob("*"), reverse=True):  # no process was left to do it
            path.unlink()
        directory.rmdir()
