"""The documentation is current: reference pages match the docstrings, every public name has one, examples run,
links lead to files.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tqdm
from worlds import PATIENCE

import rpcbench
import rpcbench.autograd as dist_autograd
import rpcbench.distributed as dist
import rpcbench.rpc as rpc
from rpcbench.runtime import deadlocks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import make_reference as reference  # noqa: E402  (a script of the documentation, not a module of the package)

RENEW = f"the pages in docs/api are old; renew them: {reference.COMMAND}"
ALONE = ("init_rpc", "Cluster")  # examples that start their own world
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def documented():
    """Yield (place, docstring) of every public name, and of the public members of classes."""
    for page in reference.PAGES:
        if not importlib.util.find_spec(reference._module(page)):
            continue
        module = importlib.import_module(reference._module(page))
        for name, value in reference.names(module):
            if not callable(value) and not inspect.ismodule(value):
                yield f"{page or 'rpcbench'}.{name}", reference.describe(module, name)
            elif callable(value) and (value.__module__ or "").startswith("rpcbench"):
                yield f"{page or 'rpcbench'}.{name}", inspect.getdoc(value) or ""
                for member, inner in reference.members(value) if inspect.isclass(value) else ():
                    yield f"{page or 'rpcbench'}.{name}.{member}", reference._doc(inner)


PLACES = dict(documented())
EXAMPLES = {doc: place for place, doc in PLACES.items() if ">>>" in doc}  # a name may be offered in several places
TEXTS = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
FENCE = re.compile(r"^```python\n(>>> .*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = [path for path in TEXTS if path.parent.name != "api" and FENCE.search(path.read_text())]


def test_reference_pages_match_the_docstrings():
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")}
    made = reference.pages()
    assert sorted(written) == sorted(made), RENEW
    assert [name for name in made if made[name] != written[name]] == [], RENEW


def test_every_public_name_has_a_docstring():
    assert [place for place, doc in PLACES.items() if not doc] == []


def test_the_help_of_each_function_of_distributed_describes_its_parameters_and_results():
    functions = [each for name in dist.__all__ if inspect.isfunction(each := getattr(dist, name))]
    texts = {each: inspect.getdoc(each) for each in functions}
    missing = {
        each.__name__: names
        for each, text in texts.items()
        if (names := [name for name in inspect.signature(each).parameters if not re.search(rf"\b{name}\b", text)])
    }
    assert missing == {}
    for each in functions:
        if "async_op" in inspect.signature(each).parameters:
            assert "Returns:" in texts[each] and "WorkerLostError" in texts[each], each.__name__


@pytest.fixture(scope="module")
def names():
    """The names that examples can use, with a running cluster."""
    with pytest.MonkeyPatch.context() as patch, rpcbench.Cluster(2) as cluster:
        patch.setattr(deadlocks, "_ANSWER_SECONDS", PATIENCE)  # `cluster.stack` reports a slow worker as one that hangs
        patch.setattr("tqdm.auto.tqdm", tqdm.tqdm)  # that of notebooks, if a test has loaded ipykernel, prints its bars
        yield {"cluster": cluster, "torch": torch, "rpcbench": rpcbench, "rpc": rpc, "dist_autograd": dist_autograd}


def failures(text, title, names):
    """Run the examples of a text; return the report of the failures."""
    found = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    runner.run(doctest.DocTestParser().get_doctest(text, dict(names), title, title, 0), out=found.append)
    return "".join(found)


@pytest.mark.process
@pytest.mark.parametrize("doc", [doc for doc, place in EXAMPLES.items() if not place.endswith(ALONE)], ids=EXAMPLES.get)
def test_examples_in_docstrings_run(doc, names):
    assert failures(doc, EXAMPLES[doc], names) == ""


@pytest.mark.process
@pytest.mark.parametrize("doc", [doc for doc, place in EXAMPLES.items() if place.endswith(ALONE)], ids=EXAMPLES.get)
def test_examples_that_start_their_own_world_run(doc, no_leaks):
    script = f"import doctest; doctest.run_docstring_examples({doc!r}, {{}}, optionflags={OPTIONS})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.process
@pytest.mark.parametrize("page", SHOWN, ids=lambda path: path.name)
def test_examples_of_pages_run(names, page):
    assert failures("\n".join(FENCE.findall(page.read_text())), page.name, names) == ""


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    links = LINK.findall(path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
