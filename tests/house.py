"""`python -m tests.house`: the figures of the house: the amount of text that a reader must know before a change.

Files, lines, repeated names, comments, words, Protocols; and, traced in all processes while it runs, the files that
take part in one call, cell, backward pass and pipeline step. `--no-trace` leaves the traces out.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rpcbench"
FREE_RELATIVE = re.compile(r"\b(who|whom|whose|what|whatever|whoever)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z']*")
TWICE_ALLOWED = {"__init__", "base", "events"}
IRREGULAR = {
    "begun", "bound", "broken", "built", "done", "drawn", "given", "gone", "heard", "held", "kept", "known", "lost",
    "made", "meant", "met", "over", "said", "seen", "sent", "shown", "taken", "told",
}  # fmt: skip
NO_PARTICIPLES = {"need", "feed", "speed", "seed", "embed", "exceed"}


def sources() -> dict[Path, str]:
    """The text of each Python file of the package."""
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module, of its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def comments(source: str) -> list[str]:
    """The comments of a module, one for each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def prose(source: str) -> str:
    """Docstrings and comments of a module."""
    return "\n".join([*docstrings(source), *comments(source)])


def free_relatives(texts: list[str]) -> float:
    """The number of who, whom, whose, what, whatever and whoever in 1,000 words."""
    words = sum(len(WORD.findall(text)) for text in texts)
    return 1000 * sum(len(FREE_RELATIVE.findall(text)) for text in texts) / max(words, 1)


def classes(source: str) -> list[ast.ClassDef]:
    """The classes of a module, those inside others too."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def protocols(source: str) -> list[str]:
    """The names of the classes that are a `typing.Protocol`."""
    return [node.name for node in classes(source) if "Protocol" in map(ast.unparse, node.bases)]


class FunctionName(NamedTuple):
    """A function of the package, and its class or ""."""

    name: str
    owner: str


def function_names(files: Iterable[str]) -> list[FunctionName]:
    """All functions and methods, also those in functions, without Python's own names such as `__init__`."""

    def walk(node: ast.AST, owner: str) -> Iterator[FunctionName]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if not (child.name.startswith("__") and child.name.endswith("__")):
                    yield FunctionName(child.name, owner)
                yield from walk(child, "")
            else:
                yield from walk(child, child.name if isinstance(child, ast.ClassDef) else owner)

    return [name for source in files for name in walk(ast.parse(source), "")]


class NameFigures(NamedTuple):
    """Shares are of all functions, `shared` of all methods."""

    one_word: float
    participles: float
    shared: float
    length: float


def is_participle(word: str) -> bool:
    return word not in NO_PARTICIPLES and (word.endswith("ed") or word in IRREGULAR)


def name_figures(files: Iterable[str]) -> NameFigures:
    """One-word names, bare participles, methods whose name stands in four classes or more; a name's mean length."""
    found = function_names(files)
    names = [each.name.strip("_") for each in found] or ["no_functions"]
    words = [name for name in names if "_" not in name]
    methods = [each for each in found if each.owner]
    owners = Counter(each.name for each in set(methods))
    return NameFigures(
        len(words) / len(names),
        sum(map(is_participle, words)) / len(names),
        sum(owners[each.name] >= 4 for each in methods) / max(len(methods), 1),
        sum(map(len, names)) / len(names),
    )


def repeated(names: Counter[str]) -> list[str]:
    """Names that occur more than once."""
    return sorted(name for name, count in names.items() if count > 1)


def figures() -> dict[str, str]:
    """All figures that need no running process, by title."""
    files = sources()
    lines = sum(len(source.splitlines()) for source in files.values())
    noted = sum(len(comments(source)) for source in files.values())
    stems = Counter(path.stem for path in files if path.stem not in TWICE_ALLOWED)
    named = Counter(node.name for source in files.values() for node in classes(source))
    structural = sorted(name for source in files.values() for name in protocols(source))
    relatives = free_relatives([prose(source) for source in files.values()])
    names = name_figures(files.values())
    longest = max(files, key=lambda path: len(files[path].splitlines()))
    return {
        "files": str(len(files)),
        "lines": f"{lines:,}",
        "longest file": f"{longest.relative_to(ROOT)}, {len(files[longest].splitlines())} lines",
        "file names twice": ", ".join(repeated(stems)) or "none",
        "class names twice": ", ".join(repeated(named)) or "none",
        "Protocols": f"{len(structural)}: {', '.join(structural)}",
        "comments": f"{100 * noted / lines:.1f} % of lines",
        "who, whom, whose, what(ever) in prose": f"{relatives:.1f} in 1,000 words",
        "functions with a name of one word": f"{names.one_word:.1%}",
        "functions with a bare participle for a name": f"{names.participles:.1%}",
        "methods whose name stands in four classes or more": f"{names.shared:.1%}",
        "mean length of a function's name": f"{names.length:.1f}",
        "words of README": str(len((ROOT / "README.md").read_text().split())),
        "words of ARCHITECTURE": str(len((ROOT / "ARCHITECTURE.md").read_text().split())),
    }


def traces() -> dict[str, list[str]]:
    """The files that take part in each deed, in any process. The deeds run in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "flag").write_bytes(b"\0")
        path = os.pathsep.join([str(ROOT / "tests" / "house_trace"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"HOUSE_TRACE": folder, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "tests.house", "--deeds"], env=env, check=True, cwd=ROOT)
        found: dict[str, list[str]] = {}
        for number, title in enumerate(DEEDS, 1):
            noted = {line for file in Path(folder).glob(f"{number}-*") for line in file.read_text().splitlines()}
            found[title] = sorted(str(Path(line).relative_to(PACKAGE)) for line in noted)
        return found


def _deeds() -> None:
    """Do each deed three times, and trace the third time only: by then, all that is made once has been made."""
    from IPython.core.interactiveshell import InteractiveShell

    import rpcbench

    flag = Path(os.environ["HOUSE_TRACE"], "flag")
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "rpcbench")
    with rpcbench.Cluster(2) as cluster:
        for number, make in enumerate(DEEDS.values(), 1):
            deed = make(cluster, shell)
            deed()
            deed()
            with flag.open("r+b") as file:
                file.write(bytes([number]))
            deed()
            with flag.open("r+b") as file:
                file.write(b"\0")


def _call(cluster: object, shell: object) -> Callable[[], object]:
    import torch

    from rpcbench import rpc

    return lambda: rpc.rpc_sync("worker1", torch.add, (1, 2))


def _cell(cluster: object, shell: object) -> Callable[[], object]:
    return lambda: shell.run_cell("%%remote worker1 -o y\ny = 1 + 1")  # type: ignore[attr-defined]


def _backward(cluster: object, shell: object) -> Callable[[], object]:
    import torch

    from rpcbench import autograd, rpc

    weight = torch.ones(2, requires_grad=True)

    def forward_and_backward() -> None:
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("worker1", torch.mul, (weight, weight)).sum()])

    return forward_and_backward


def _step(cluster: object, shell: object) -> Callable[[], object]:
    import torch
    from torch import nn
    from torch.nn import functional

    from rpcbench.pipeline import Pipeline, split

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    stages = split(model, workers=cluster.workers, balance="params")  # type: ignore[attr-defined]
    sgd = (torch.optim.SGD, {"lr": 0.1})
    pipe = Pipeline(stages, schedule="1f1b", microbatches=4, loss_fn=functional.cross_entropy, optimizer=sgd)
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    return lambda: pipe.step(x, y)


DEEDS = {"a call": _call, "a cell": _cell, "a forward and backward pass": _backward, "a pipeline step": _step}


def main(arguments: list[str]) -> None:
    if "--deeds" in arguments:
        _deeds()
        return
    for title, figure in figures().items():
        print(f"{title}: {figure}")
    for title, files in {} if "--no-trace" in arguments else traces().items():
        print(f"files of {title}: {len(files)}")
        if "--files" in arguments:
            print("   ", ", ".join(files))


if __name__ == "__main__":
    main(sys.argv[1:])
