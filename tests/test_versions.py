"""The required versions of other packages are those that CI runs."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def pins(name):
    """{package: version} of a file of constraints."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in (line.split("==") for line in lines)}


def claims():
    """{package: accepted versions} of the requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {canonicalize_name(each.name): each.specifier for each in map(Requirement, project["dependencies"])}


def lowest(accepted):
    (found,) = (Version(each.version) for each in accepted if each.operator == ">=")
    return found


def test_the_lowest_required_versions_are_those_that_ci_runs():
    oldest, claimed = pins("constraints-oldest.txt"), claims()
    assert {"ipykernel", "ipython", "ipywidgets", "jupyter-client", "torch"} == set(oldest)
    assert {name: lowest(claimed[name]) for name in oldest} == oldest


def test_the_pinned_versions_are_accepted():
    known, claimed = pins("constraints.txt"), claims()
    assert {name: str(known[name]) for name, accepted in claimed.items() if known[name] not in accepted} == {}


def test_the_matrix_of_ci_has_the_ends_of_what_is_accepted():
    matrix = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    pythons, torches = (json.loads(re.search(rf"^ +{name}: (\[.*\])", matrix, re.M)[1]) for name in ("python", "torch"))
    accepted = claims()["torch"]
    (ceiling,) = (Version(each.version) for each in accepted if each.operator == "<")
    lowest_torch, newest_torch = map(Version, torches)
    assert lowest_torch == lowest(accepted)
    assert (newest_torch.major, newest_torch.minor + 1) == (ceiling.major, ceiling.minor)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    assert [each.removeprefix(prefix) for each in project["classifiers"] if each.startswith(prefix)] == pythons
    assert project["requires-python"] == f">={pythons[0]}"


def test_the_extra_for_lessons_has_all_that_the_debug_server_of_torch_imports():
    folder = Path(importlib.util.find_spec("torch.distributed.debug").origin).parent
    nodes = [node for path in folder.glob("*.py") for node in ast.parse(path.read_text()).body]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    names |= {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    others = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"torch"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lab = [Requirement(text).name for text in project["optional-dependencies"]["lab"]]
    required = [*importlib.metadata.requires("jupyterlab"), *importlib.metadata.requires("jupyterlab-server")]
    there = {*lab, *(Requirement(text).name.lower() for text in required)}
    assert others and others <= there
