"""Launchers by name: those of rpcbench, those of other packages, and errors for unknown names and options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rpcbench
from rpcbench.base.errors import RpcError
from rpcbench.launch import registry
from rpcbench.notebook.completion import Vocabulary
from rpcbench.notebook.parsers import cluster_line
from rpcbench.transport import hosts

PLUGIN = """
from rpcbench.launch.process import ProcessLauncher

def make(directory, greeting="hello"):
    made.append(greeting)
    return ProcessLauncher(directory, "fork")

made = []
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed package that provides launchers."""
    metadata = tmp_path / "more_launchers-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: more-launchers\nVersion: 1.0\n")
    lines = [
        "mine = more_launchers:make", "broken = broken_launcher:make", "missing = no_such_package:make",
        "local = broken_launcher:make",
    ]  # fmt: skip
    (metadata / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines]))
    (tmp_path / "more_launchers.py").write_text(PLUGIN)
    (tmp_path / "broken_launcher.py").write_text("raise OSError('the license server is asleep')")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("plugins")
def test_launcher_names_are_those_of_rpcbench_and_of_packages() -> None:
    ours = list(registry.OWN)
    assert registry.launcher_names()[: len(ours)] == ours
    assert {"mine", "broken", "missing"} <= set(registry.launcher_names()) and registry.launcher_names().count(
        "local"
    ) == 1
    with pytest.raises(ValueError, match=r"no launcher 'slurm'; there are local, kernel, command,.* mine"):
        rpcbench.Cluster(1, launcher="slurm")


@pytest.mark.process
@pytest.mark.usefixtures("plugins")
def test_a_launcher_of_another_package_starts_workers_with_its_options(no_leaks: None) -> None:
    with rpcbench.Cluster(1, launcher="mine", options={"greeting": "hi"}) as cluster:
        assert cluster.rpc_sync("worker1", max, (3, 5)) == 5 and cluster.kind == "mine"
    assert sys.modules["more_launchers"].made == ["hi"]


@pytest.mark.usefixtures("plugins")
def test_a_launcher_that_cannot_start_raises_the_reason(no_leaks: None) -> None:
    with pytest.raises(RpcError, match=r"'broken' \(broken_launcher:make\) cannot .* OSError: the license server is"):
        rpcbench.Cluster(1, launcher="broken")
    with pytest.raises(RpcError, match="launcher 'missing' need no_such_package, which is not installed"):
        rpcbench.Cluster(1, launcher="missing")
    with pytest.raises(ValueError, match=r"'mine': got an unexpected keyword argument 'hosts'; its options: greeting"):
        rpcbench.Cluster(1, launcher="mine", options={"hosts": "a"})
    with pytest.raises(ValueError, match="'command': missing a required argument: 'template'; its options: template"):
        rpcbench.Cluster(1, launcher="command")


def test_kind_and_start_choose_a_launcher_and_contradictions_are_refused() -> None:
    assert registry.choose_launcher(None, "process", "python3", "spawn") == ("local", {"start": "spawn"})
    assert registry.choose_launcher(None, "kernel", "python3", None) == ("kernel", {"kernel": "python3"})
    assert registry.choose_launcher("command", "process", "python3", None) == ("command", {})
    with pytest.raises(ValueError, match="kind='kernel' means the launcher 'kernel', not 'command'"):
        registry.choose_launcher("command", "kernel", "python3", None)
    with pytest.raises(ValueError, match="start='spawn' is for workers of kind 'process'; launcher 'command'"):
        registry.choose_launcher("command", "process", "python3", "spawn")
    with pytest.raises(ValueError, match="workers of launcher 'local' are on this host and need none"):
        rpcbench.Cluster(1, address="10.0.0.1")


def test_options_of_a_launcher_are_offered_and_its_name_is_in_the_help() -> None:
    words = Vocabulary((), ()).words_after("%cluster", ["start", "2", "--launcher", "command"])
    assert {"template=", "hosts=", "python="} <= {*words}
    assert not any(
        "=" in word for word in Vocabulary((), ()).words_after("%cluster", ["start", "2", "--launcher=nope"])
    )
    help_text = " ".join(cluster_line().action("start").format_help().split())
    assert all(f"{name}: {own.text}" in help_text for name, own in registry.OWN.items())


# -- the address of the notebook
def test_an_address_is_parsed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts.outbound_address("10.0.0.1:29500") == "tls://10.0.0.1:29500"
    assert hosts.outbound_address("node7") == "tls://node7:0"
    assert hosts.outbound_address("[fe80::1]:7") == "tls://[fe80::1]:7"
    monkeypatch.setenv(hosts.BIND_VARIABLE, "10.9.9.9")
    assert hosts.outbound_address(":29500") == "tls://10.9.9.9:29500"
    for wrong in ("host:port", "tls://10.0.0.1", "me@host", "a/b", "host:70000"):
        with pytest.raises(ValueError, match=r"address=.* is invalid; write"):
            hosts.outbound_address(wrong)


def test_an_address_is_required_on_a_host_with_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(host: str, port: int) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.delenv(hosts.BIND_VARIABLE, raising=False)
    monkeypatch.setattr(hosts.listeners, "interface_towards", unreachable)
    monkeypatch.setattr(hosts.psutil, "net_if_addrs", dict)
    with pytest.raises(RpcError, match=r"none but loopback\): pass address="):
        hosts.outbound_address()
