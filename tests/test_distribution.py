"""The distribution: its name in all texts, one version, and the packages that it requires."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import rpcbench

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = PROJECT["name"]
NOT_OURS = {"build", "dist", "node_modules", "lib"}  # folders with the files of other packages, or made from ours
HIDDEN = {".binder", ".ci", ".github"}

# The package index has no release of `jupyter-rpcbench` yet, so no text may install it by its name: texts install a
# checkout or a wheel. After the first release the group `(?:jupyter-)?` goes.
_INSTALL = r"(?:pip3?|pipx|conda|mamba|uv)\s+(?:install|add)\b"
_OURS = r"(?<![\w./*'\"-])['\"]?(?:jupyter-)?rpcbench(?![\w./*-])"
BY_NAME = [
    re.compile(rf"{_INSTALL}(?:\s|(?:[^`|;&\n]|\\\n)*[ \t]){_OURS}"),  # pip install rpcbench
    re.compile(r"(?<![\w./-])rpcbench\[[a-z]"),  # rpcbench[ray]
    re.compile(r"(?<![\w./-])rpcbench *(?:==|>=|~=) *\d"),  # rpcbench==0.1.0
]


def texts(root: Path) -> Iterator[tuple[Path, str]]:
    """The path and the text of each file of the tree that is text."""
    for folder, inner, names in os.walk(root):
        inner[:] = [each for each in inner if each in HIDDEN or (each[0] != "." and each not in NOT_OURS)]
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(UnicodeDecodeError):
                yield path, path.read_text()


def installs_by_name(text: str) -> list[str]:
    """The places of a text that install, or require, this package by a name that the package index does not have."""
    return [found.group() for pattern in BY_NAME for found in pattern.finditer(text)]


def test_no_text_installs_the_package_of_another_author() -> None:
    found = {str(path.relative_to(ROOT)): places for path, text in texts(ROOT) if (places := installs_by_name(text))}
    assert found.keys() <= {str(Path(__file__).relative_to(ROOT))}, found  # the lines below


def test_the_search_for_names_covers_notebooks_and_the_extension() -> None:
    suffixes = {path.suffix for path, _ in texts(ROOT)}
    assert {".py", ".md", ".ipynb", ".ts", ".tsx", ".json", ".toml", ".yml", ".txt", ".svg", ""} <= suffixes
    assert ROOT / ".ci" / "wheel" in {path for path, _ in texts(ROOT)}


@pytest.mark.parametrize(
    "line",
    [
        "pip install {}", "%pip install -q {}", "uv pip install '{}'", "pip install torch {}", 'pip install "{}"',
        "pipx install {}", "uv add {}", "pip install -U \\\n    {}", "`pip install {}` installs", "`pip install\n{}`",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rpcbench", "jupyter-rpcbench"])
def test_a_line_that_installs_the_name_is_found(line: str, name: str) -> None:
    assert installs_by_name(line.format(name))


@pytest.mark.parametrize("extra", ["[ray]", "[lab,gpu]", "==0.1.0", ">=0.1", " >= 0.1"])
def test_a_requirement_of_the_name_is_found(extra: str) -> None:
    assert installs_by_name(f"- rpcbench{extra}")


@pytest.mark.parametrize(
    "line",
    [
        "pip install -e '.[lab]'", "pip install jupyter_rpcbench-*.whl", "pip install ray, then `rpcbench demo`",
        "pip install jupyter_rpcbench-0.1.0-py3-none-any.whl", "pip install scikit-learn; rpcbench demo",
        'dev = ["jupyter-rpcbench[lab,site]"]', "pip uninstall rpcbench", "pip install /tmp/rpcbench",
    ],
)  # fmt: skip
def test_a_checkout_a_wheel_and_other_packages_may_be_installed(line: str) -> None:
    assert installs_by_name(line) == []


def test_all_parts_have_one_version() -> None:
    assert "version" in PROJECT["dynamic"]  # taken from the package, by hatch
    for path in ("extension/package.json", "extension/labextension/package.json"):
        assert json.loads((ROOT / path).read_text())["version"] == rpcbench.__version__, path
    lock = json.loads((ROOT / "extension" / "package-lock.json").read_text())
    assert {lock["version"], lock["packages"][""]["version"]} == {rpcbench.__version__}
    changes = (ROOT / "CHANGELOG.md").read_text()
    named = re.search(r"^## \[(\d[\w.]*)\]|^This will be (\d[\w.]*?),", changes, re.MULTILINE)
    assert named and (named[1] or named[2]) == rpcbench.__version__, "the first version in CHANGELOG.md"


def test_jupyterlab_finds_the_updates_of_the_extension_under_the_name_of_this_distribution() -> None:
    """JupyterLab's extension manager installs, as an update, the distribution with the name of the extension."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    place = f"share/jupyter/labextensions/{NAME}"
    assert wheel["shared-data"] == {"extension/labextension": place, "extension/install.json": f"{place}/install.json"}
    for path in ("extension/package.json", "extension/labextension/package.json"):
        assert json.loads((ROOT / path).read_text())["name"] == NAME, path
    told = json.loads((ROOT / "extension" / "install.json").read_text())
    assert (told["packageManager"], told["packageName"]) == ("python", NAME)


def test_make_demo_installs_only_what_the_demo_needs_and_nothing_where_the_tests_run(tmp_path: Path) -> None:
    def planned(target: str) -> str:
        return subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    assert "-e . scikit-learn\n" in planned("demo") and "[dev]" not in planned("demo")
    (tmp_path / ".venv" / "demo").touch()
    assert "pip" not in planned("demo") and "-e '.[dev]'\n" in planned("test")
    (tmp_path / ".venv" / "demo").unlink()
    (tmp_path / ".venv" / "ready").touch()
    assert "pip" not in planned("demo") + planned("test")


JUPYTER = {"IPython", "ipykernel", "ipywidgets", "jupyter_client", "anywidget", "comm", "traitlets", "zmq"}
SCRIPT = f"""
import sys
from importlib.abc import MetaPathFinder

JUPYTER = {JUPYTER}

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in JUPYTER:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

if sys.argv[3] == "absent":
    sys.meta_path.insert(0, Absent())

import rpcbench.rpc as rpc

me, other = f"worker{{sys.argv[1]}}", f"worker{{1 - int(sys.argv[1])}}"
options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[2])
rpc.init_rpc(me, rank=int(sys.argv[1]), world_size=2, rpc_backend_options=options)
assert rpc.rpc_sync(other, divmod, (7, 3)) == (2, 1)
rpc.shutdown()
loaded = JUPYTER & {{name.partition(".")[0] for name in sys.modules}}
sys.exit(f"loaded {{loaded}}" if loaded else 0)
"""


@pytest.mark.process
@pytest.mark.parametrize("jupyter", ["installed", "absent"])
def test_a_script_with_the_import_changed_loads_no_package_of_jupyter(jupyter: str, tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, rank, meeting, jupyter], stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        ends = [(rank.communicate(timeout=100)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [code for _, code in ends] == [0, 0], ends
