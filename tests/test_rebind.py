"""`rpcbench run`: programs for torch's RPC run on rpcbench, also in the processes that they spawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcbench import torch_shim
from rpcbench.cli.main import main

NAMES = Path(__file__).with_name("rebind_names.py")
PROGRAM = Path(__file__).with_name("rebind_program.py")
SECONDS = 120.0
COMMAND = "import sys; from rpcbench.cli.main import main; sys.exit(main())"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as runtime:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
        yield {**os.environ, "XDG_RUNTIME_DIR": runtime, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def python(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.long
@pytest.mark.process
def test_a_program_that_spawns_its_ranks_runs_unchanged(environment: dict[str, str]) -> None:
    done = python("-c", COMMAND, "run", str(PROGRAM), "29533", "--flag", environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0.5, 0.5] [1.0, 2.0] 1.0", "rpcbench 29533 --flag"], done.stdout


EXAMPLES: dict[str, list[str]] = {  # the output of each program of tests/rebind_examples.py
    "batch": ["[[[-2.0, -2.0]], [[-2.0, -2.0]]]"],
    "parameter_server": ["4 True"],
    "pipeline": ["[4.0, 4.0, 4.0, 4.0, 4.0, 4.0] [1.0, 1.0]"],
    "rl": ["{1: [1.0, 3.0, 7.0], 2: [2.0, 6.0, 14.0]}"],
    "rnn": ["7 True"],
    "ddp_rpc": ["True"],
}
LIBRARIES: dict[str, list[str]] = {  # and of tests/rebind_libraries.py
    "geometric": [
        "RPC has not been initialized False [[0, 2, 4], [1]]",
        "RPC has not been initialized False [[0, 4, 8]]",
    ],
    "replay": ["[[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]] 4"],
    "collector": ["{0: [[2.0, 2.0], [20.0, 20.0]], 1: [[4.0, 4.0], [40.0, 40.0]]}"],
    "pippy": ["[[10.0, 40.0], [70.0, 100.0]] rank 1 has 0 waiting"],
}
LONG = ("rnn", "rl", "batch", "pipeline", "parameter_server", "geometric")
PROGRAMS = [
    *(("rebind_examples.py", name, lines) for name, lines in EXAMPLES.items()),
    *(("rebind_libraries.py", name, lines) for name, lines in LIBRARIES.items()),
]


@pytest.mark.process
@pytest.mark.parametrize(("program", "name", "lines"), [
    pytest.param(*each, id=each[1], marks=[pytest.mark.long] if each[1] in LONG else []) for each in PROGRAMS
])  # fmt: skip
def test_programs_in_the_style_of_examples_and_libraries_run_unchanged(
    environment: dict[str, str], program: str, name: str, lines: list[str]
) -> None:
    done = python("-c", COMMAND, "run", str(PROGRAM.with_name(program)), name, environment=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == lines, done.stderr


@pytest.mark.parametrize("first", [
    "torch.distributed.rpc", *(pytest.param(name, marks=pytest.mark.long) for name in (
        "torch", "torch.distributed.rpc.api", "torch.distributed.nn",
    )),
])  # fmt: skip
def test_names_are_bound_in_any_order_of_imports(environment: dict[str, str], first: str) -> None:
    script = f"""
import {first}
import torch, torch.distributed.nn, torch.distributed.optim, torch.distributed.optim.optimizer as optimizer
import torch.distributed.rpc as rpc, torch.distributed.autograd as autograd
from torch.distributed.rpc.functions import async_execution
found = [rpc.init_rpc, torch.distributed.rpc.api.rpc_sync, rpc.RRef, autograd.backward, async_execution,
         optimizer.DistributedOptimizer, torch.distributed.optim.DistributedOptimizer,
         torch.distributed.nn.RemoteModule, rpc.rref_proxy.RRefProxy]
print({{thing.__module__.split(".")[0] for thing in found}}, torch.distributed.optim.ZeroRedundancyOptimizer.__name__)
"""
    done = python("-c", script, environment=torch_shim.extend_environment(environment))
    assert done.stdout == "{'rpcbench'} ZeroRedundancyOptimizer\n", done.stderr


ABSENT = {  # names of torch that cannot be imported, by reason
    "torch's own state, which nothing here keeps up": """rpc._init_counter rpc.api._ALL_WORKER_NAMES
        rpc.api._all_gather_sequence_id rpc.api._all_gather_sequence_id_to_states optim.optimizer.functional_optim_map
        nn.api.remote_module._REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING""",
    "left over from a loop or for type checkers": """autograd.TYPE_CHECKING rpc.api.TYPE_CHECKING rpc.api._P rpc.api._R
        rpc.api.T rpc.api.method_name rpc.api.method rpc.api.docstring rpc.backend_registry._backend_type_doc
        nn.api.remote_module.T""",
    "imported there for torch's own use": """rpc.rref_proxy.rpc_async rpc.rref_proxy.UNSET_RPC_TIMEOUT
        optim.optimizer.RRef nn.api.remote_module._internal_rpc_pickler""",
}
OTHERWISE = {("torch.distributed.autograd", "context"): "function"}
"""A class with torch, used as `with context()` only."""


def test_each_name_of_the_bound_modules_is_offered_or_refuses_by_name(environment: dict[str, str]) -> None:
    done = python(str(NAMES), environment=environment)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 240 and {module for module, *_ in rows} == set(torch_shim._MODULES)
    absent = {f"torch.distributed.{name}" for names in ABSENT.values() for name in names.split()}
    for module, name, there, here, words in rows:
        full = f"{module}.{name}"
        assert (here == "absent") == (full in absent), f"{full} is {here}"
        if here == "refuses":
            assert f".{name} is a part of torch's own RPC runtime" in words
        elif here != "absent":
            assert here == OTHERWISE.get((module, name), there), full


def test_the_c_modules_of_torch_have_the_classes_of_rpcbench(environment: dict[str, str]) -> None:
    script = """
import torch, torch.distributed.rpc as rpc, torch.distributed.autograd as autograd
from torch._C._distributed_rpc import PyRRef, RemoteProfilerManager, _is_current_rpc_agent_set
from torch._C._distributed_autograd import DistAutogradContext
options = rpc.TensorPipeRpcBackendOptions(init_method="file:///nowhere/rebind")
before = _is_current_rpc_agent_set()
rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
print(before, _is_current_rpc_agent_set(), isinstance(rpc.RRef(1), torch._C._distributed_rpc.PyRRef),
      isinstance(rpc.remote("me", abs, (1,)), PyRRef), autograd.is_available())
with autograd.context() as context_id:
    print(isinstance(torch._C._distributed_autograd._retrieve_context(context_id), DistAutogradContext))
rpc.shutdown()
print(_is_current_rpc_agent_set())
try:
    RemoteProfilerManager.set_current_profiling_key("key")
except NotImplementedError as error:
    print(str(error).split()[0])
"""
    done = python("-c", script, environment=torch_shim.extend_environment(environment))
    assert done.stdout.split() == [
        "False", "True", "True", "True", "True", "True", "False", "torch.distributed.rpc.RemoteProfilerManager",
    ], done.stderr  # fmt: skip


def test_torch_keeps_its_own_rpc_without_the_command(environment: dict[str, str]) -> None:
    script = "import rpcbench.rpc, torch.distributed.rpc as rpc; print(rpc.init_rpc.__module__)"
    bound = torch_shim.extend_environment(environment)
    del bound[torch_shim.VARIABLE]
    assert python("-c", script, environment=bound).stdout == "torch.distributed.rpc\n"


def test_a_sitecustomize_of_the_user_runs_too(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'mine'")
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    script = "import torch.distributed.rpc as rpc; print(mine, rpc.__name__)"
    assert python("-c", script, environment=torch_shim.extend_environment(environment)).stdout == "mine rpcbench.rpc\n"


def test_run_with_m_runs_a_module_and_keeps_its_exit_status(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys, torch.distributed.rpc as rpc; sys.exit(len(rpc.__name__))")
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    assert python("-c", COMMAND, "run", "-m", "program", environment=environment).returncode == len("rpcbench.rpc")


@pytest.mark.parametrize(("arguments", "words"), [([], "name a script"), (["no.py"], "there is no script no.py")])
def test_run_without_an_existing_script_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 1
    assert words in capsys.readouterr().err
