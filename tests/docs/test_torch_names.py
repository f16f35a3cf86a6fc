"""The table of torch.distributed's names: each public name of torch is in it and works as it says."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

import rpcbench.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import torch_names  # noqa: E402  (a script of the documentation, not a module of the package)

PAGE = ROOT / "docs" / "api" / torch_names.FILE
ENTRIES = list(torch_names.entries())
IMPORTED = {"logging", "sys", "timedelta", "torch", "traceback", "typing"}
LATER = ("no `weights_only`", "no `enable_reconfigure`")  # which torch has from 2.14 on
this_torch = pytest.mark.skipif(
    not torch.__version__.startswith(f"{torch_names.TORCH}."), reason=f"the table is about torch {torch_names.TORCH}"
)


@this_torch
def test_every_public_name_of_torch_is_on_the_page() -> None:
    text = PAGE.read_text()
    names = [name for name in dir(c10d) if not name.startswith("_") and name not in IMPORTED]
    told = set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
    missing = [name for name in [*names, *c10d.distributed_c10d.__all__] if name not in told]
    assert missing == [] and set(torch_names.imported()) == IMPORTED
    assert text == torch_names.page(PAGE), "the page is old; renew it: python docs/make_reference.py"


def test_every_name_is_found_here_as_the_table_says() -> None:
    values = [each for each in ENTRIES if each.name not in {*torch_names.BUILDS, *torch_names.modules(), "reduce_op"}]
    for each in values:
        ours = getattr(dist, each.name)
        assert (ours is getattr(c10d, each.name)) is (each.here == torch_names.TORCHS), each
        assert each.here == torch_names.TORCHS or ours.__module__.startswith("rpcbench.distributed"), each
    assert {each.name for each in ENTRIES if each.here == torch_names.OURS} >= {"all_reduce", "Work", "P2POp", "rpc"}
    assert dist.tensor is torch.distributed.tensor and dist.launch.__name__ == "rpcbench.distributed.launch"


def test_functions_of_ours_take_the_parameters_of_torch() -> None:
    differences = {each.name: [one for one in each.differences if one not in LATER] for each in ENTRIES}
    found = {name: found for name, found in differences.items() if found}
    assert found == {"get_process_group_ranks": ["`group=None`"]}


def test_a_parameter_that_ours_lacks_moves_or_changes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(tensor: object, group: object = 1, src: object = None, more: object = None) -> None: ...

    monkeypatch.setattr(dist, "broadcast", broadcast)
    assert torch_names._differences(inspect.signature(c10d.broadcast), "broadcast") == [
        "`src` at another place", "`group` at another place", "no `async_op`", "no `group_src`", "also `more`",
    ]  # fmt: skip
