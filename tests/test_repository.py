"""The repository's YAML files can be read, and the files, targets and commands that they name exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILES = [*sorted(ROOT.glob(".github/**/*.yml")), ROOT / ".pre-commit-config.yaml", ROOT / ".binder" / "environment.yml"]
WORKFLOWS = [path for path in FILES if path.parent.name == "workflows"]
FORMS = [path for path in FILES if path.parent.name == "ISSUE_TEMPLATE"]
MAKEFILE = (ROOT / "Makefile").read_text()


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def commands(workflow: dict) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_files_are_found():
    assert {"ci.yml", "site.yml", "release.yml"} <= {path.name for path in WORKFLOWS}
    assert {path.name for path in FORMS} == {"bug.yml", "feature.yml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_parses(path):
    assert isinstance(read(path), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_calls_exists(path):
    workflow = read(path)
    jobs = workflow["jobs"]
    text = "\n".join(commands(workflow))
    scripts, targets = re.findall(r"\.ci/\w+", text), re.findall(r"\bmake ([\w-]+)", text)
    assert scripts or targets
    assert [script for script in scripts if not os.access(ROOT / script, os.X_OK)] == []
    assert [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []
    assert [job["needs"] for job in jobs.values() if job.get("needs", next(iter(jobs))) not in jobs] == []


def test_a_release_is_published_without_a_token_and_after_approval():
    publish = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["publish"]
    assert publish["needs"] == "build" and publish["environment"] == "release"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["with"] == {"attestations": True}


def test_the_checks_before_a_commit_are_those_of_make_lint():
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    assert [f"\t$(BIN)/{hook['entry']}" for hook in local["hooks"]] == recipe.splitlines()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_for_issues_has_what_the_forge_asks_for(path):
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields and all(field["id"] and field["attributes"]["label"] for field in fields)
