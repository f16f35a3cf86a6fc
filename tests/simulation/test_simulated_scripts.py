"""`rpcbench simulate script.py`: scripts as torchrun starts them, and the command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rpcbench
from rpcbench import SimulationError
from rpcbench.cli.main import main
from rpcbench.launch.simulate_scripts import Script, play_script
from rpcbench.simulation.rank_log import Collective, Kernel, RankLog

HERE = Path(__file__).parent
DDP, FSDP = str(HERE / "scripts_ddp.py"), str(HERE / "scripts_fsdp.py")

Play = Callable[..., RankLog]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Plays a script as rank 0 of 8 in this process, which gets its variables back."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])

    def play(name: str | Path, *arguments: str, values: float | None = None) -> RankLog:
        return play_script(Script(str(name), rpcbench.hardware("a100"), arguments, values=values), {"dp": 8}, 0)

    return play


def collectives(log: RankLog) -> list[Collective]:
    return [each for each in log.actions if isinstance(each, Collective)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_of_a_script_with_ddp_is_that_of_its_optimizer(play: Play, device: str) -> None:
    log = play(DDP, "--device", device)
    assert {each.op for each in collectives(log)} == {"all_reduce(SUM)"}
    assert sum(each.bytes for each in collectives(log)) == 4 * log.parameters  # once, for two micro-batches
    products = [each for each in log.actions if isinstance(each, Kernel) and each.kind == "matmul"]
    assert {each.dtype for each in products} == {"bfloat16" if device == "cuda" else "float32"}
    assert len(products) == 2 * 3 * (2 * 4 + 1)  # micro-batches, passes, layers
    assert log.before["gradients"] == 2 * 4 * log.parameters  # and DDP's buckets: `zero_grad` follows the step
    assert log.assumed == ["torch.compile is not simulated: what it compiles runs as it was written"]


def test_a_script_for_gpus_with_fsdp_and_tensor_parallel(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    log = play(FSDP, "2", values=1.5)
    assert log.before["optimizer"] == pytest.approx(2 * log.before["parameters"], rel=0.01)
    kinds = [each.kind for each in collectives(log) if each.site.startswith("FSDP")]
    assert kinds.count("all_gather") == 2 * 3
    assert kinds.count("reduce_scatter") == 3
    assert capsys.readouterr().out.splitlines()[0].startswith("0 1.5 1.5 ")
    assert len(log.assumed) == 1
    assert "values that are read here are assumed to be 1.5" in log.assumed[0]


SHORT = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range({steps}):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step(){more}
"""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (SHORT.format(steps=2, more=""), "stepped its optimizer 2 times.*let it train for at least 3 steps"),
        ("import torch", "has ended and stepped no optimizer of torch.optim"),
        (SHORT.format(steps=3, more="; print(loss.item())"), "line 8 reads the value of a tensor.*--values 1.0"),
        ("raise SystemExit('no data')", "has exited: no data"),
        ("import absent_module", r"failed: ModuleNotFoundError: No module named 'absent_module'\n.*line 1"),
        (
            "import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, world_size=2)",
            "makes a world of 2 ranks, and the mesh has 8: take the size from the environment variable WORLD_SIZE",
        ),
    ],
)
def test_a_script_without_a_step_is_an_error_that_says_why(play: Play, tmp_path: Path, source: str, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    with pytest.raises(SimulationError, match=text) as error:
        play(script)
    assert "train.py" in str(error.value)


TUTORIAL = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(backend="nccl", init_method="env://", rank=int(os.environ["RANK"]), world_size=8)
local_rank = int(os.environ["LOCAL_RANK"])
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)).cuda(local_rank)
model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
for images, labels in DataLoader(data, 8, shuffle=True, pin_memory=True):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(images.to(local_rank)), labels.to(local_rank))
    if torch.isnan(loss):
        raise ValueError("the loss is not a number")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    dist.barrier(device_ids=[local_rank])
    print(f"loss {loss:.3f}")
    torch.save(model.state_dict(), sys.argv[1])
"""


def test_a_script_as_tutorials_have_them(play: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "model.pt"
    script.write_text(TUTORIAL)
    log = play(script, str(saved), values=2.0)
    assert capsys.readouterr().out == "loss 2.000\n" * 2
    assert not saved.exists()
    assert [each.partition(": ")[2] for each in log.assumed] == [
        "values that are read here are assumed to be False", "values that are read here are assumed to be 2.0",
        "no checkpoint is written",
    ]  # fmt: skip
    assert [each.kind for each in collectives(log)] == ["barrier", "broadcast", "broadcast", "all_reduce"]


def test_the_script_ends_with_its_step(play: Play, tmp_path: Path) -> None:
    script, end = tmp_path / "train.py", tmp_path / "end"
    steps = "\n".join(f"    {line}" for line in SHORT.format(steps=9, more="; done += 1").strip().splitlines())
    last = f"from pathlib import Path; Path({str(end)!r}).write_text(str(done))"
    script.write_text(f"done = 0\ntry:\n{steps}\nfinally:\n    {last}")
    assert play(script).parameters == 20
    assert end.read_text() == "2"  # the third one has not returned


def test_of_several_optimizers_the_first_one_counts(play: Play, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHORT.format(steps=3, more="; other.step()").replace(
        "for", "other = torch.optim.AdamW(torch.nn.Linear(4, 4).parameters())\nfor", 1
    ))  # fmt: skip
    assert sum(isinstance(each, Kernel) and each.kind == "matmul" for each in play(script).actions) == 2


def test_the_command_prints_a_report_and_saves_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "step.json"
    given = ["--mesh", "dp=16", "--hardware", "a100", "--tokens", "8192", "--save", str(saved), "--values", "2", "--"]
    assert main(["simulate", DDP, *given, "--steps", "4", "--log"]) == 0
    printed = capsys.readouterr().out
    assert "dp 16: 16 ranks of a100" in printed
    assert "tokens per second and rank" in printed
    assert str(saved) in printed
    assert "values that are read here are assumed to be 2.0" in printed
    assert "count as equal, and are not" not in printed  # though rank 0 alone reads them
    assert json.loads(saved.read_text())["traceEvents"]


def test_a_rank_that_dies_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; os._exit(3)")
    assert main(["simulate", str(script), "--mesh", "dp=1"]) == 1
    assert "the process of a rank has ended before its step" in capsys.readouterr().err


def test_the_command_compares_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", FSDP, "--mesh", "dp=2,tp=2", "--layouts", "--values", "1", "--", "{tp}"]) == 0
    printed = capsys.readouterr().out
    assert {line.split("  ")[0] for line in printed.splitlines()} >= {"dp 4", "dp 2, tp 2", "tp 4"}
    assert "Error" not in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([DDP, "--mesh", "dp:4"], "'dp:4' is no mesh: give each dimension once, as dp=16,tp=8"),
        ([DDP, "--mesh", "dp=0"], "'dp=0' is no mesh"),
        ([DDP, "--mesh", "dp=2,dp=2"], "'dp=2,dp=2' is no mesh"),
        ([DDP], "required: --mesh"),
        (["absent.py", "--mesh", "dp=4"], "there is no script absent.py"),
        (["-m", "absent", "--mesh", "dp=4"], "there is no module absent"),
        ([DDP, "--mesh", "dp=4", "--hardware", "h10"], "h100"),
        ([DDP, "--mesh", "dp=4", "--layouts", "--save", "a.json"], "--save writes one step, and --layouts plays many"),
        ([DDP, "--mesh", "dp=4", "--save", "absent/a.json"], "there is no directory absent for a.json"),
    ],
)
def test_a_wrong_argument_is_a_sentence(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["simulate", *arguments])
    except SystemExit as end:
        status = int(str(end.code))
    assert status in (1, 2)
    assert text in capsys.readouterr().err
