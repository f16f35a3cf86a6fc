"""`import rpcbench` says what it needs: a system other than Windows, and a torch for which its tests have run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rpcbench.base import requirements

ROOT = Path(__file__).parents[2]
WANTED = "pip install 'torch>=2.13,<2.15'"


def import_with(torch: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """`import rpcbench` in a new Python that finds torch in this folder first."""
    script = f"import sys\nsys.path[:0] = [{str(torch)!r}, {str(ROOT)!r}]\n{before}\nimport rpcbench\n"
    script += "print('imported', 'torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def put_torch(folder: Path, version: str) -> Path:
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (package / "version.py").write_text(f"from typing import Optional\n\n__version__ = '{version}'\ndebug = False\n")
    return folder


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and done.stdout == "", done
    return done.stderr.splitlines()[-1]


def test_an_older_torch_is_named_and_not_replaced(tmp_path: Path) -> None:
    for version in ("2.12.9", "2.11.0+cu128", "1.14.0"):
        folder = tmp_path / version
        folder.mkdir()
        assert sentence(import_with(put_torch(folder, version))) == (
            f"ImportError: rpcbench needs torch 2.13 or later, and {folder / 'torch'} is torch {version}, which "
            f"rpcbench does not replace: to do so yourself, run {WANTED} and restart Python"
        )


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.14.0a0+git12"])
def test_a_torch_between_the_bounds_is_not_imported_and_not_mentioned(tmp_path: Path, version: str) -> None:
    done = import_with(put_torch(tmp_path, version))
    assert (done.stdout, done.stderr) == ("imported False\n", "")


@pytest.mark.parametrize("version", ["2.15.0", "3.0"])
def test_an_untried_torch_gives_a_warning_at_the_line_of_the_import(tmp_path: Path, version: str) -> None:
    done = import_with(put_torch(tmp_path, version))
    assert done.stdout == "imported False\n"
    first, *source = done.stderr.splitlines()
    assert source in ([], ["  import rpcbench"])  # Python 3.13 has the text of such a line, too
    assert first == (
        f"<string>:4: RuntimeWarning: rpcbench was tested with torch before 2.15, and {tmp_path / 'torch'} is torch "
        f"{version}: parts of rpcbench may fail with it"
    )


def test_without_torch_the_remedy_is_named(tmp_path: Path) -> None:
    done = import_with(tmp_path, "sys.path[:] = [each for each in sys.path if 'site-packages' not in each]")
    assert sentence(done) == (
        f"ImportError: rpcbench needs torch 2.13 or later, and {sys.executable} has none: install it with {WANTED}"
    )


def test_a_torch_without_a_version_is_called_damaged(tmp_path: Path) -> None:
    (put_torch(tmp_path, "2.13.0") / "torch" / "version.py").write_text("")
    said = f"ImportError: torch in {tmp_path / 'torch'} is damaged: its version.py names no version"
    assert sentence(import_with(tmp_path)) == said


def test_windows_is_refused_before_anything_else(tmp_path: Path) -> None:
    done = import_with(put_torch(tmp_path, "2.11.0"), "sys.platform = 'win32'")
    assert sentence(done) == (
        "ImportError: rpcbench does not run on Windows: use it in WSL 2, the Windows Subsystem for Linux"
    )


def test_the_torch_of_these_tests_is_within_the_bounds_that_pip_is_given() -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = (each for each in map(Requirement, lines) if each.name == "torch")
    bounds = (requirements.LOWEST_TORCH, requirements.FIRST_UNTRIED_TORCH)
    assert {str(each) for each in torch.specifier} == {
        f"{sign}{numbers[0]}.{numbers[1]}" for sign, numbers in zip((">=", "<"), bounds, strict=True)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        requirements.check_requirements()
