"""Runs torch's own RPC tests on our runtime: `python suite_server.py SECONDS`, names on stdin, results on stdout.

One process imports torch, binds our names (`rpcbench.torch_shim`) and loads torch's test classes from its wheel.
Each test is forked from it into a session of its own, with ranks forked in turn, and killed with all it left.

A line in: "Class.test". A line out: a JSON list of name, "pass" | "fail" | "skip", and what was said last. First of all
comes one line with a JSON list of all names there are.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

HOME = "torch.testing._internal.distributed"
CLASSES = {
    "rpc.rpc_test": ["RpcTest", "TensorPipeAgentRpcTest"],
    "rpc.dist_autograd_test": ["DistAutogradTest", "TensorPipeAgentDistAutogradTest"],
    "rpc.dist_optimizer_test": ["DistOptimizerTest"],
    "rpc.examples.parameter_server_test": ["ParameterServerTest"],
    "rpc.examples.reinforcement_learning_rpc_test": ["ReinforcementLearningRpcTest"],
    "nn.api.remote_module_test": ["RemoteModuleTest", "ThreeWorkersRemoteModuleTest"],
}


def load(seconds: int) -> dict[str, type[unittest.TestCase]]:
    """Class.test → a class that runs it on forked ranks of ours."""
    from torch.testing._internal import common_distributed as common

    from rpcbench import torch_shim

    torch_shim.bind_modules()
    common.TIMEOUT_DEFAULT = seconds
    common.TIMEOUT_OVERRIDE.clear()
    fixture = importlib.import_module(f"{HOME}.rpc.rpc_agent_test_fixture").RpcAgentTestFixture
    found: dict[str, type[unittest.TestCase]] = {}
    for module, names in CLASSES.items():
        tests = importlib.import_module(f"{HOME}.{module}")
        for name in names:
            bases = (getattr(tests, name), _ours(fixture), _launcher(common))
            made: type[unittest.TestCase] = type(f"Our{name}", bases, {})
            found |= {f"{name}.{test}": made for test in unittest.TestLoader().getTestCaseNames(made)}
    return found


def _ours(fixture: type) -> type:
    """torch's fixture for an agent, with our backend."""
    from rpcbench.rpc import backend_registry

    class Fixture(fixture):  # type: ignore[misc]
        rpc_backend = backend_registry.BackendType.TENSORPIPE

        @property
        def rpc_backend_options(self) -> Any:
            return backend_registry.construct_rpc_backend_options(self.rpc_backend, init_method=self.init_method)

        def get_shutdown_error_regex(self) -> str:
            return "is gone|was lost|has gone|cannot be reached|not been initialized"

        def get_timeout_error_regex(self) -> str:
            return "RPC ran for more than"

    return Fixture


def _launcher(common: Any) -> type:
    import torch.multiprocessing

    class Launcher(common.MultiProcessTestCase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Launcher


def run(name: str, case: type[unittest.TestCase], seconds: int) -> list[str]:
    """One test, in a session of its own."""
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as scratch:
        log = Path(scratch, "log")
        pid = os.fork()
        if pid == 0:
            _session(name, case, scratch, log)
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
        signal.alarm(seconds + 15)  # the test's own limit comes first
        _, status = os.waitpid(pid, 0)
        signal.alarm(0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # ranks that outlived it
        outcome = {0: "pass", 2: "skip"}.get(os.waitstatus_to_exitcode(status), "fail")
        return [name, outcome, "" if outcome == "pass" else log.read_text(errors="replace")[-4000:]]


def _session(name: str, case: type[unittest.TestCase], scratch: str, log: Path) -> None:
    """The forked child: its exit status is 0, 1 or 2 for passed, failed and skipped. Never returns."""
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
        os.environ["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"] = tempfile.tempdir = scratch
        result = unittest.TestResult()
        case(name.rpartition(".")[2]).run(result)
        print(*(text for _, text in [*result.errors, *result.failures, *result.skipped]), flush=True)
        status = 2 if result.skipped else int(not result.wasSuccessful())
    finally:
        os._exit(status)


def main() -> None:
    seconds = int(sys.argv[1])
    tests = load(seconds)
    answer = os.fdopen(os.dup(1), "w", 1)
    print(json.dumps(list(tests)), file=answer)
    for name in map(str.strip, sys.stdin):
        print(json.dumps(run(name, tests[name], seconds)), file=answer)


if __name__ == "__main__":
    main()
