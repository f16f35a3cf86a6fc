"""The lines with which README, and make, install rpcbench bring torch's build for CPUs.

Nothing is downloaded: two indexes of empty packages stand for the package index, where torch is the build with CUDA,
and for torch's own. The machine's settings of pip do not count.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA = "nvidia-cublas"
NEWEST = "2.99.0"


def add_wheel(
    index: Path, name: str, version: str, requires: list[str], extras: dict[str, list[str]] | None = None
) -> Path:
    """Put a package without modules into an index; return its wheel."""
    stem = f"{re.sub('[-_.]+', '_', name)}-{version}"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {each}" for each in requires),
    ]
    for extra, wanted in (extras or {}).items():
        metadata += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {each}; extra == "{extra}"' for each in wanted)]
    folder = index / re.sub("[-_.]+", "-", name).lower()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    links = [f'<a href="{each.name.replace("+", "%2B")}">{each.name}</a>' for each in sorted(folder.glob("*.whl"))]
    (folder / "index.html").write_text("\n".join(links))
    return wheel


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package index, with all that constraints.txt pins, and torch's index for CPUs."""
    public, cpu = tmp_path_factory.mktemp("public"), tmp_path_factory.mktemp("cpu")
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for name, version in pins:
        for each in (version, NEWEST) if name == "torch" else (version,):
            add_wheel(public, name, each, [CUDA] if name == "torch" else [])
        if name == "torch":
            add_wheel(cpu, name, f"{version}+cpu", [])
            add_wheel(cpu, name, f"{NEWEST}+cpu", [])
    add_wheel(public, CUDA, "13.0", [])
    return public, cpu


def own_wheel(folder: Path) -> Path:
    """A wheel with the requirements of this project and nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return add_wheel(folder, project["name"], "0.0", project["dependencies"], extras)


def install(lines: list[str], indexes: tuple[Path, Path], scratch: Path) -> dict[str, str]:
    """Run lines of pip in a new environment; return {package: version} of what they installed."""
    public, cpu = indexes
    target = scratch / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(target / "bin/python")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": public.as_uri(),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_COMPILE": "1",
    }
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        words = [word.replace(CPU_INDEX, cpu.as_uri()) for word in words if word != "-e"]
        words = [
            re.sub(r"^\.(\[.*\])?$", lambda found: f"{own_wheel(scratch)}{found[1] or ''}", word) for word in words
        ]
        subprocess.run([*pip, "-q", "--disable-pip-version-check", *words], check=True, env=env, cwd=ROOT)
    listed = subprocess.run(
        [*pip, "list", "--format=freeze"], check=True, env=env, capture_output=True, text=True
    ).stdout
    return dict(line.split("==") for line in listed.split())


def readme_lines() -> list[str]:
    block = re.search(r"^## Install$.*?^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    return [line for line in block[1].splitlines() if line.startswith("pip install ")]


def make_lines(target: str) -> list[str]:
    """The lines of pip with which make fills an environment, on a machine without a GPU."""
    options = ["-n", "-B", f"CPU_INDEX=--extra-index-url {CPU_INDEX}", "READY=.venv/none", target]
    shown = subprocess.run(["make", *options], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [line.partition("bin/")[2] for line in shown.splitlines() if "/pip install " in line]


@pytest.mark.parametrize("target", [".venv/demo", ".venv/none"])
def test_the_lines_of_make_bring_the_build_for_cpus(indexes: tuple[Path, Path], tmp_path: Path, target: str) -> None:
    found = install(make_lines(target), indexes, tmp_path)
    assert found["torch"].endswith("+cpu") and CUDA not in found
    assert ("mypy" in found) == (target == ".venv/none")


def test_the_lines_of_the_readme_bring_the_build_for_cpus(indexes: tuple[Path, Path], tmp_path: Path) -> None:
    found = install(readme_lines(), indexes, tmp_path)
    assert found["torch"].endswith("+cpu") and CUDA not in found
    assert {"jupyterlab", "ipywidgets", "cloudpickle"} <= found.keys()


def test_with_a_gpu_the_second_line_brings_the_build_with_cuda(indexes: tuple[Path, Path], tmp_path: Path) -> None:
    """So the stubs show the difference."""
    assert CUDA in install(readme_lines()[1:], indexes, tmp_path)
