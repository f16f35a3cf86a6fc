"""Workers that the real ssh starts on two hosts with an sshd each; the hosts are network namespaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from far_commands import line_with
from launch_bench import until
from netlab import Host, connected
from openssh_here import PORTS, Node, nodes, skip_unless_installed
from typed_notebook import ADD_UP, Notebook, typed_notebook

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.ssh]

PLAIN = line_with('"ssh {host} {cmd}"')
START = '%cluster start {n} --launcher command {options} template="ssh {{host}} {{cmd}}" hosts={hosts}'
NOTEBOOK_PORT = 29500


class Lab(NamedTuple):
    host: Host  # of the notebook
    nodes: list[Node]
    env: dict[str, str]
    notebook: Notebook


def start(n: int = 1, hosts: str = "node1", options: str = "--name other") -> str:
    return START.format(n=n, hosts=hosts, options=options)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A notebook without workers."""
    skip_unless_installed()
    with (
        connected(3) as (host, *hosts),
        nodes(hosts, tmp_path_factory.mktemp("ssh")) as (made, env),
        typed_notebook(host.entry, env) as notebook,
    ):
        yield Lab(host, made, env, notebook)


@pytest.fixture(scope="module")
def two(lab: Lab) -> Lab:
    """A notebook with a worker on each node, for tests that leave them."""
    assert "2 workers: worker1, worker2." in lab.notebook.run(PLAIN)
    return lab


def left(lab: Lab) -> set[int]:
    """The processes on the nodes but for each sshd."""
    return {pid for node in lab.nodes for pid in node.others()}


def clients(lab: Lab, word: str) -> list[psutil.Process]:
    """The ssh that run on the notebook's host with this word on their command line."""
    found = [each for each in psutil.process_iter(["name", "cmdline"]) if each.pid in lab.host.processes()]
    return [each for each in found if each.info["name"] == "ssh" and word in each.info["cmdline"]]


# -- two workers
def test_workers_run_on_their_hosts(two: Lab) -> None:
    shown = two.notebook.run("%%remote all\nimport socket\nprint('on', socket.gethostname())")
    assert sorted(re.findall(r"(worker\d).* on (\w+)", shown)) == [("worker1", "node1"), ("worker2", "node2")]
    status = two.notebook.run("%cluster status")
    assert "node1" in status and "node2" in status


def test_ranks_add_up_over_the_hosts(two: Lab) -> None:
    assert two.notebook.run(ADD_UP).count("sum 3.0") == 2


def test_a_worker_takes_ports_of_its_hosts_range(two: Lab) -> None:
    two.notebook.run("members = cluster.agent.machine.read_node(lambda node: list(node.members.members.values()))")
    shown = two.notebook.run("[member.remote for member in members if member.id]")
    taken = re.findall(r"tls://10\.231\.7\.\d:(\d+)", shown)
    assert len(taken) == 2 and all(int(port) in PORTS for port in taken), shown


def test_a_worker_starts_again_on_its_host(two: Lab) -> None:
    before = two.notebook.run("print(cluster.pid('worker2'))")
    two.notebook.run("%cluster restart worker2")
    assert two.notebook.run("print(cluster.pid('worker2'))") != before
    assert "node2" in two.notebook.run("%%remote worker2\nimport socket\nprint(socket.gethostname())")


def test_the_end_of_ssh_during_a_cell_is_reported_and_ends_its_worker(two: Lab, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    pid = int(two.notebook.run("print(cluster.pid('worker1'))"))
    two.notebook.begin(f"%%remote worker1\nopen({str(runs)!r}, 'x')\nimport time\ntime.sleep(600)")
    until(runs.exists)
    (ssh,) = clients(two, "worker1")
    ssh.kill()
    _, error = two.notebook.answer()
    assert error.startswith("WorkerLostError: worker1 was lost"), error
    assert "the command that ran it ended (killed by SIGKILL)" in error
    until(lambda: not psutil.pid_exists(pid))
    two.notebook.run("%cluster restart worker1")
    assert two.notebook.run(ADD_UP).count("sum 3.0") == 2


# -- a start that fails
@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("nowhere", r"ssh: Could not resolve hostname nowhere: .+"),
        ("keyless", r"\S+: Permission denied \(publickey\)\."),
        ("forged", r"(?:.*\n)+Host key verification failed\."),
    ],
)
def test_the_error_of_a_start_quotes_ssh(lab: Lab, host: str, words: str) -> None:
    error = lab.notebook.error_of(start(hosts=host))
    told = rf"RpcError: the command that starts worker1 on {host} ended \(exit code 255\) before worker1 could serve:\n"
    assert re.fullmatch(rf"{told}{words}\nThe command: ssh {host} .* worker1", error), error
    until(lambda: not clients(lab, host))


# -- a login shell
@pytest.mark.parametrize(("line", "is_login"), [(line_with("bash -lc", "ssh"), True), (PLAIN, False)])
def test_a_login_shell_reads_its_profile(lab: Lab, line: str, is_login: bool) -> None:
    before = left(lab)
    lab.notebook.run(line.replace("start 2", "start 2 --name login"))
    try:
        shown = lab.notebook.run("%%remote all\nimport os\nprint('LOGIN_SHELL' in os.environ)")
        assert shown.count(str(is_login)) == 2
    finally:
        lab.notebook.run("%cluster stop")
    until(lambda: left(lab) <= before)


# -- a firewall
@pytest.fixture
def firewall(lab: Lab) -> Iterator[Lab]:
    """A lab whose hosts have no rules of a firewall, before and after."""
    yield lab
    for host in (lab.host, *(node.host for node in lab.nodes)):
        rule(host, "-F")
        rule(host, "-t nat -F")


def rule(host: Host, words: str) -> None:
    host.run("iptables", *words.split())


@pytest.mark.parametrize(
    ("how", "met"), [("REJECT --reject-with tcp-reset", "Connection refused"), ("DROP", "no answer in 10 s")]
)
def test_a_notebook_behind_a_firewall_is_reported_with_its_address(firewall: Lab, how: str, met: str) -> None:
    lab = firewall
    rule(lab.nodes[0].host, f"-A OUTPUT -p tcp --syn -d {lab.host.address} -j {how}")
    error = lab.notebook.error_of(start(options=f"--name other --address :{NOTEBOOK_PORT}"))
    place = rf"tls://{re.escape(lab.host.address)}:{NOTEBOOK_PORT}"
    assert re.search(rf"worker1, on host node1, cannot reach the notebook at {place}: {met}\. Let", error), error


def test_the_ports_that_the_page_names_are_enough(firewall: Lab) -> None:
    """That of --address on the notebook's host; on a worker's those of its range, for the other worker's host alone."""
    lab, (one, other) = firewall, firewall.nodes
    ports = f"--dport {PORTS[0]}:{PORTS[-1]}"
    for host, allowed in (
        (lab.host, f"--dport {NOTEBOOK_PORT}"),
        (one.host, f"-s {other.host.address} {ports}"),
        (other.host, f"-s {one.host.address} {ports}"),
    ):
        rule(host, f"-A INPUT -p tcp --syn {allowed} -j ACCEPT")
        rule(host, "-A INPUT -p tcp --syn ! --dport 22 -i e0 -j DROP")
    lab.notebook.run(start(2, "node1,node2", f"--name walled --address :{NOTEBOOK_PORT}"))
    assert lab.notebook.run(ADD_UP).count("sum 3.0") == 2
    lab.notebook.run("%cluster stop")


def test_ranks_whose_hosts_are_kept_apart_are_told_of_the_port(firewall: Lab) -> None:
    lab, (one, other) = firewall, firewall.nodes
    lab.notebook.run(start(2, "node1,node2", "--name apart"))
    rule(one.host, f"-A INPUT -p tcp --syn -s {other.host.address} -j DROP")
    lab.notebook.begin(
        "%%remote all\nimport datetime\nimport rpcbench.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=3))"
    )
    shown = " ".join("".join(lab.notebook.answer()).split())
    port = rf"{re.escape(one.host.address)}:\d+"
    assert re.search(rf"with the same world_size and group_name, and reach the store at {port}", shown), shown
    assert re.search(rf"no store has answered at {port} for 3 s \(timed out\): .*, or a firewall", shown), shown
    lab.notebook.run("%cluster stop")


@pytest.mark.parametrize("is_of_one_host", [True, False])
def test_tunnels_lead_to_a_notebook_that_no_host_can_dial(firewall: Lab, is_of_one_host: bool) -> None:
    """As behind a router at home."""
    lab, line = firewall, line_with(f"-R {NOTEBOOK_PORT}").replace("start 2", "start 2 --name tunnelled")
    if not is_of_one_host:
        line = line.replace("{host} {cmd}", "{host} env RPCBENCH_BIND={host} {cmd}")
        line = line.replace("hosts=node1", "hosts=" + ",".join(node.host.address for node in lab.nodes))
    rule(lab.host, "-A INPUT -p tcp --syn -i e0 -j DROP")
    lab.notebook.run(line)
    assert lab.notebook.run(ADD_UP).count("sum 3.0") == 2
    lab.notebook.run("%cluster stop")


def test_a_port_that_a_router_forwards_leads_to_the_notebook(firewall: Lab) -> None:
    lab, router = firewall, "10.99.0.1"
    for node in lab.nodes:
        node.host.ip("route", "replace", f"{router}/32", "via", lab.host.address)
        to = f"{lab.host.address}:{NOTEBOOK_PORT}"
        rule(node.host, f"-t nat -A OUTPUT -p tcp -d {router} --dport {NOTEBOOK_PORT} -j DNAT --to-destination {to}")
    address = f"--name routed --address {router}:{NOTEBOOK_PORT}"
    error = lab.notebook.error_of(start(options=address))
    assert f"{router}:{NOTEBOOK_PORT} is not an address of this host: set RPCBENCH_BIND to one that is" in error
    lab.notebook.run(f"import os\nos.environ['RPCBENCH_BIND'] = '{lab.host.address}'")
    try:
        lab.notebook.run(start(2, "node1,node2", address))
    finally:
        lab.notebook.run("del os.environ['RPCBENCH_BIND']")
    assert lab.notebook.run(ADD_UP).count("sum 3.0") == 2
    lab.notebook.run("%cluster stop")


# -- ends
def test_stop_leaves_no_process(two: Lab) -> None:
    assert left(two) and clients(two, "worker1")
    two.notebook.run("%cluster use main\n%cluster stop")
    until(lambda: not left(two))
    until(lambda: not clients(two, "worker1"))


def test_a_killed_notebook_leaves_no_process(lab: Lab) -> None:
    with typed_notebook(lab.host.entry, lab.env) as notebook:
        notebook.run(PLAIN)
        assert left(lab)
        notebook.process.kill()
        until(lambda: not left(lab))
