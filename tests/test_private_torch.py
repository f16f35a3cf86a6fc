"""The private names of torch that rpcbench uses are in one list, and the installed torch has each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_torch import ROOT, files_of, find, listed, search, unlisted

PACKAGE = ROOT / "rpcbench"


def test_the_list_has_the_private_names_that_the_source_uses_and_no_other():
    assert unlisted(PACKAGE) == []


def test_the_installed_torch_has_each_name():
    used = search(PACKAGE)
    gone = []
    for name, use in listed().items():
        try:
            find(name)
        except LookupError as error:
            gone.append(f"torch {torch.__version__}: {error}; {use} in {files_of(name, used)}")
    assert gone == []


def test_a_private_name_that_is_new_in_the_source_is_found_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(
        "import torch\nimport torch._other as other\nfrom torch.nn import functional as F\n"
        "def act(self, tensor):\n"
        "    self._own = torch._C._new_thing(F._inner.deep, other.part, tensor._hidden, torch.add(self._own))\n"
        "    return getattr(tensor, '_in_text'), 'torch._as.path', torch.nn.__name__\n"
    )
    assert sorted(search(tmp_path)) == [
        "_hidden", "_in_text", "torch._C._new_thing", "torch._as.path", "torch._other.part",
        "torch.nn.functional._inner.deep",
    ]  # fmt: skip
    assert "torch._C._new_thing in layer.py: add it to the list" in unlisted(tmp_path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("torch._C._no_such", "torch._C has no _no_such"),
        ("torch.nn.Module._no_such.more", "torch.nn.Module has no _no_such"),
        ("torch._no_such.more", "torch has no _no_such"),
    ],
)
def test_a_name_that_torch_lacks_is_told_with_the_part_that_is_gone(path: str, reason: str) -> None:
    with pytest.raises(LookupError, match=f"^{reason}$"):
        find(path)
