"""The shape of the package: floors, circles, purity, sizes, names, words, headers, unpickling, exports.

Each rule is a function from a source tree to the list of its breaches, so that each can be tested, too: on a tiny tree
that breaks it. Imports inside functions and under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import house
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "rpcbench"

FLOORS = {
    "base": 0,
    "wire": 1,
    "protocol": 2,
    **dict.fromkeys(["serialization", "transport"], 3),
    "runtime": 4,
    **dict.fromkeys(["rpc", "autograd", "optim", "nn", "pipeline", "distributed", "named", "compare", "simulation"], 5),
    "cells": 6,
    **dict.fromkeys(["launch", "worker"], 7),
    "telemetry": 8,
    **dict.fromkeys(["notebook", "panels", "cli", "testing", "torch_shim"], 9),
    "__main__": 9,
    "": 9,  # rpcbench/__init__.py: the public names, looked up lazily
}

_OUTSIDE = {"torch", "numpy", "socket", "selectors", "asyncio", "multiprocessing", "subprocess", "IPython", "zmq"}
_CLOCKS = {"threading", "time"}
PURE = {  # prefix of module name -> what it must not import
    "rpcbench.base": _OUTSIDE,
    "rpcbench.wire": _OUTSIDE | _CLOCKS,
    "rpcbench.protocol": _OUTSIDE | _CLOCKS,
}
NOT_PURE = {"rpcbench.base.futures"}  # a subclass of torch's Future
LOADED_BY_OTHERS = _CLOCKS | {"selectors", "subprocess"}  # the standard library loads these itself

UNPICKLERS = {  # all but the first read files of the user
    "rpcbench.serialization.pickler", "rpcbench.optim.optimizer_files", "rpcbench.distributed.flight_dumps",
}  # fmt: skip
UNPICKLING = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "torch", "joblib"}

EXTRAS = {"ray": "rpcbench.launch.ray_"}  # an optional package -> prefix of the modules that import it

LONGEST_FILE, MEDIAN_FILE, LONGEST_FUNCTION = 600, 250, 60
SHORTEST_FILE = 59
SMALL = {
    "cli",
    "panels",
    "rpc",
    "torch_shim",
}  # entry points, torch's own files, and files that are still to be moved
ALLOWED_TWICE = {"base", "events"}
MIRRORS = {"panels", "rpc"}
LONGEST_SCRIPT = 300
MOST_PROTOCOLS = 16
NAME_BOUNDS = house.NameFigures(one_word=0.2, participles=0.02, shared=0.2, length=11)
MOST_FREE_RELATIVES = 3.0  # in 1,000 words of docstrings and comments
LEAST_COMMENTS = 0.05  # of lines
RETIRED = {  # private words of earlier versions -> the words of the field
    "accord": "commit", "bell": "event", "crew": "worker group", "keeper": "maintenance", "outpost": "supervisor",
    "petition": "request", "reunion": "reconnection", "roster": "members", "starter": "fork server",
    "zygote": "fork server",
}  # fmt: skip
ANY = re.compile(r"(?::|\bas|<|\|) *any\b")


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    is_package: bool
    source: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


def modules(root: Path) -> dict[str, Module]:
    """Every module of the package below `root`, by name."""
    return _repository() if root == ROOT else _parsed(root)


@functools.cache
def _repository() -> dict[str, Module]:
    return _parsed(ROOT)


def _parsed(root: Path) -> dict[str, Module]:
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        source = path.read_text()
        found[name] = Module(name, is_package, source, ast.parse(source))
    return found


def imports(module: Module, known: dict[str, Module]) -> Iterator[tuple[str, int]]:
    """(absolute name of an imported module, line); `from package import module` names the module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield (inner if inner in known else source), node.lineno


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    base = module.package.split(".")
    return ".".join([*base[: len(base) - node.level + 1], *([node.module] if node.module else [])])


def _part(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def upward(root: Path) -> list[str]:
    """Imports from a higher floor, and parts of the package without a floor."""
    known = modules(root)
    breaches = [f"{name}: give '{_part(name)}' a floor in FLOORS" for name in known if _part(name) not in FLOORS]
    for name, module in known.items():
        for target, line in imports(module, known):
            if target.split(".")[0] == PACKAGE and FLOORS.get(_part(target), 0) > FLOORS.get(_part(name), 9):
                breaches.append(f"{name}:{line} imports {target}, a higher floor")
    return breaches


def circles(root: Path) -> list[str]:
    """Groups of modules that import one another."""
    known = modules(root)
    edges = {name: {t for t, _ in imports(m, known) if t in known and t != name} for name, m in known.items()}
    reach = {name: _reachable(name, edges) for name in edges}
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in edges if a in reach[a]}
    return sorted("a circle: " + ", ".join(sorted(group)) for group in groups)


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [*edges[start]]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead.extend(edges[name])
    return seen


def _forbidden(name: str) -> set[str]:
    """The imports that are forbidden to a module; none if it is not pure."""
    rules = [rule for prefix, rule in PURE.items() if f"{name}.".startswith(f"{prefix}.")]
    return rules[0] if rules and name not in NOT_PURE else set()


def impure(root: Path) -> list[str]:
    """Modules of the pure floors that import I/O, threads, clocks, torch or the notebook."""
    known = modules(root)
    return [
        f"{name}:{line} imports {target}"
        for name, module in known.items()
        for target, line in imports(module, known)
        if target.split(".")[0] in _forbidden(name)
    ]


def impure_when_loaded(root: Path) -> list[str]:
    """The same, observed: forbidden modules that a fresh interpreter has loaded after importing the pure ones."""
    pure = [name for name in modules(root) if _forbidden(name)]
    forbidden = set.union(set(), *map(_forbidden, pure)) - LOADED_BY_OTHERS
    script = f"import sys, {', '.join(pure)}\nprint(*sorted({forbidden!r} & set(sys.modules)))"
    return [f"importing the pure floors loads {name}" for name in _python(root, script).split()]


def too_long(root: Path) -> list[str]:
    """Files and functions that are too long for one idea."""
    known = modules(root)
    lengths = {name: module.source.count("\n") for name, module in known.items() if module.source}
    breaches = [f"{name}: {n} lines, at most {LONGEST_FILE}" for name, n in lengths.items() if n > LONGEST_FILE]
    if (middle := median(lengths.values())) > MEDIAN_FILE:
        breaches.append(f"the median file has {middle:.0f} lines, at most {MEDIAN_FILE}")
    for name, module in known.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
                if size > LONGEST_FUNCTION:
                    breaches.append(f"{name}.{node.name}: {size} lines, at most {LONGEST_FUNCTION}")
    return breaches


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the docstring, which may list arguments and errors; 0 if there is none."""
    first = node.body[0]
    return (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0


def same_names(root: Path) -> list[str]:
    """Files with the same name: a reader who looks for one must find one. Panels and torch's names mirror others."""
    names: dict[str, list[str]] = {}
    for name, module in modules(root).items():
        stem = name.rpartition(".")[2]
        if not module.is_package and _part(name) not in MIRRORS and stem not in ALLOWED_TWICE:
            names.setdefault(stem, []).append(name)
    return [f"one name: {', '.join(each)}" for each in names.values() if len(each) > 1]


def same_classes(root: Path) -> list[str]:
    """Classes with the same name: one word for two ideas."""
    places: dict[str, list[str]] = {}
    for name, module in modules(root).items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    return [f"class {name} in {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def too_many_protocols(root: Path) -> list[str]:
    """Protocols are for two implementations, or for users: a class with one implementation is imported."""
    found = [f"{name}.{each}" for name, module in modules(root).items() for each in house.protocols(module.source)]
    return [f"{len(found)} Protocols, at most {MOST_PROTOCOLS}: {found}"] if len(found) > MOST_PROTOCOLS else []


def unclear(root: Path) -> list[str]:
    """Prose with clauses that begin with who or what, in place of a noun."""
    texts = {name: house.prose(module.source) for name, module in modules(root).items()}
    if (rate := house.free_relatives([*texts.values()])) <= MOST_FREE_RELATIVES:
        return []
    worst = sorted(texts, key=lambda name: -len(house.FREE_RELATIVE.findall(texts[name])))[:5]
    return [f"{rate:.1f} free relatives in 1,000 words, at most {MOST_FREE_RELATIVES}; most in {', '.join(worst)}"]


def vague_names(root: Path) -> list[str]:
    """Too many functions with a name of one word, a bare participle, or a name of many classes."""
    found = house.name_figures(module.source for module in modules(root).values())
    shares = zip(found, NAME_BOUNDS, strict=True)
    wrong = [f"{found._fields[i]} {share:.3f}" for i, (share, bound) in enumerate(shares) if i < 3 and share > bound]
    return wrong if found.length >= NAME_BOUNDS.length else [*wrong, f"length {found.length:.1f}"]


def uncommented(root: Path) -> list[str]:
    """A package with too few comments."""
    sources = [module.source for module in modules(root).values()]
    lines, noted = sum(map(len, map(str.splitlines, sources))), sum(map(len, map(house.comments, sources)))
    return [f"{noted} comments in {lines} lines"] if noted < LEAST_COMMENTS * lines else []


def retired_words(root: Path) -> list[str]:
    """Private words that were replaced by those of the field, in names and prose."""
    word = re.compile(rf"(?<![a-z])({'|'.join(RETIRED)})s?(?![a-z])", re.IGNORECASE)
    return [
        f"{name}:{number} says {found[1]}, not {RETIRED[found[1].lower()]}"
        for name, module in modules(root).items()
        for number, line in enumerate(module.source.splitlines(), 1)
        if (found := word.search(line))
    ]


def hidden_errors(root: Path) -> list[str]:
    """Properties of an nn.Module: its `__getattr__` hides their AttributeErrors behind one about the property."""
    return [
        f"{name}.{kind.name}.{method.name} is a property of an nn.Module: make it a method or an attribute"
        for name, module in modules(root).items()
        for kind in ast.walk(module.tree)
        if isinstance(kind, ast.ClassDef) and any(ast.unparse(base).split(".")[-1] == "Module" for base in kind.bases)
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and any("property" in ast.unparse(d) for d in method.decorator_list)
    ]


def unlabelled(root: Path) -> list[str]:
    """The package's own calls without a label: errors of their loss would name an internal function."""
    return [
        f"{name}:{call.lineno} is a call with own=True and without a label"
        for name, module in modules(root).items()
        for call in ast.walk(module.tree)
        if isinstance(call, ast.Call)
        for names in [{keyword.arg for keyword in call.keywords if ast.unparse(keyword.value) != "own"}]
        if "own" in names and "label" not in names
    ]


def too_short(root: Path) -> list[str]:
    """Files that are too short for a role of their own; entry points and files with torch's names may be short."""
    return [
        f"{name}: {n} lines, at least {SHORTEST_FILE}"
        for name, module in modules(root).items()
        if _part(name) not in SMALL and not module.is_package and name.count(".") > 1
        if (n := module.source.count("\n")) < SHORTEST_FILE
    ]


def headless(root: Path) -> list[str]:
    """Modules without a docstring."""
    return [f"{name}: no docstring" for name, module in modules(root).items() if not ast.get_docstring(module.tree)]


def unpickling(root: Path) -> list[str]:
    """Loads of pickles outside the pickler: data read elsewhere may come from a stranger."""
    return [
        f"{name}:{line} unpickles"
        for name, module in modules(root).items()
        if name not in UNPICKLERS
        for line in _loads(module.tree)
    ]


def _loads(tree: ast.Module) -> Iterator[int]:
    aliases = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr="load" | "loads" | "Unpickler"):
                if aliases.get(name) in UNPICKLING:
                    yield node.lineno
            case ast.ImportFrom(module=str(source), names=names):
                if source in UNPICKLING and {"load", "loads", "Unpickler"} & {alias.name for alias in names}:
                    yield node.lineno


def waiting_locked(root: Path) -> list[str]:
    """Events, and conditions that are entered themselves and not through their lock: Ctrl-C can leave them locked.

    `base.conditions` has safe ones.
    """
    return [
        f"{name}:{line} waits by threading.{kind}"
        for name, module in modules(root).items()
        for kind, line in _waits(module.tree)
    ]


def _waits(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="threading"), attr="Condition"), args=[ast.Attribute()]):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Name(id="threading"), attr="Condition" | "Event" as kind)):
                yield kind, node.lineno


def scripts(root: Path) -> list[str]:
    """Sources of the JupyterLab extension that are too long, have no header comment, or use `any`."""
    breaches = []
    for path in sorted((root / "extension" / "src").glob("*.ts*")):
        lines = path.read_text().splitlines()
        if len(lines) > LONGEST_SCRIPT:
            breaches.append(f"{path.name}: {len(lines)} lines, at most {LONGEST_SCRIPT}")
        if not lines or not lines[0].startswith("// "):
            breaches.append(f"{path.name}: no header")
        breaches += [f"{path.name}:{n} uses any" for n, line in enumerate(lines, 1) if ANY.search(line)]
    return breaches


def namesakes(root: Path) -> list[str]:
    """Test files with the same name: pytest, given both, stops before the first test."""
    names = Counter(path.name for path in (root / "tests").rglob("test_*.py"))
    return [f"{name}: {n} files of this name" for name, n in names.items() if n > 1]


def missing_exports(root: Path) -> list[str]:
    """Modules that cannot be imported alone, and names in `__all__` that do not exist or are repeated."""
    script = f"""
import importlib
for name in {list(modules(root))!r}:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        if not name.startswith({EXTRAS!r}.get(getattr(error, "name", None), " ")):
            print(f"{{name}}: {{type(error).__name__}}: {{error}}")
        continue
    names = getattr(module, "__all__", ())
    for public in names:
        try:
            getattr(module, public)
        except Exception as error:
            print(f"{{name}}.{{public}}: {{type(error).__name__}}: {{error}}")
    if len(set(names)) < len(names):
        print(f"{{name}}: a name stands twice in __all__")
"""
    return _python(root, script).splitlines()


def _python(root: Path, script: str) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout


Rule = Callable[[Path], list[str]]
RULES: list[Rule] = [
    upward, circles, impure, impure_when_loaded, too_long, too_short, same_names, same_classes, too_many_protocols,
    unclear, vague_names, uncommented, retired_words, headless, unpickling, waiting_locked, scripts, namesakes,
    missing_exports, hidden_errors, unlabelled,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_each_rule(rule: Rule) -> None:
    assert rule(ROOT) == []


def test_importing_rpc_loads_no_notebook_and_starts_no_thread() -> None:
    script = """
import psutil, sys, torch, torch.futures
before = psutil.Process().num_threads()
from rpcbench.rpc import init_rpc
print(psutil.Process().num_threads() - before, *({"IPython", "zmq", "ipykernel", "ipywidgets"} & set(sys.modules)))
"""
    assert _python(ROOT, script).split() == ["0"]


CASES: list[tuple[Rule, dict[str, str], str]] = [
    (upward, {"wire/a.py": "def f():\n    from rpcbench.runtime import agent"}, "wire.a:2 imports rpcbench.runtime"),
    (upward, {"wire/a.py": "from ..rpc import api", "rpc/api.py": ""}, "wire.a:1 imports rpcbench.rpc.api"),
    (upward, {"base/a.py": "if TYPE_CHECKING:\n    import rpcbench.wire.b"}, "base.a:2 imports rpcbench.wire.b"),
    (upward, {"cells/a.py": "from rpcbench.launch import base"}, "cells.a:1 imports rpcbench.launch, a higher floor"),
    (upward, {"wire/a.py": "import rpcbench"}, "wire.a:1 imports rpcbench, a higher floor"),
    (upward, {"attic/a.py": ""}, "give 'attic' a floor"),
    (circles, {"rpc/a.py": "from rpcbench.rpc import b", "rpc/b.py": "from . import a"}, "rpc.a, rpcbench.rpc.b"),
    (circles, {"rpc/a.py": "from rpcbench.nn import x", "nn.py": "def f():\n    import rpcbench.rpc.a"}, "nn, "),
    (impure, {"protocol/a.py": "import torch.nn"}, "protocol.a:1 imports torch.nn"),
    (impure, {"protocol/a.py": "def f():\n    from time import monotonic"}, "protocol.a:2 imports time"),
    (impure, {"wire/framing.py": "import threading"}, "wire.framing:1 imports threading"),
    (impure, {"base/ids.py": "import socket"}, "base.ids:1 imports socket"),
    (impure_when_loaded, {"protocol/a.py": "import rpcbench.runtime", "runtime.py": "import asyncio"}, "loads asyncio"),
    (too_long, {"rpc/a.py": "x = 1\n" * 601}, "rpc.a: 601 lines"),
    (too_long, {"rpc/a.py": "x = 1\n" * 251, "rpc/b.py": "x = 1\n" * 251}, "the median file has 251 lines"),
    (too_long, {"rpc/a.py": "def f():\n" + "    x = 1\n" * 60}, "rpc.a.f: 61 lines"),
    (too_short, {"wire/a.py": "x = 1\n" * 58}, "wire.a: 58 lines, at least"),
    (same_names, {"wire/a.py": "", "protocol/a.py": ""}, "one name: rpcbench.protocol.a, rpcbench.wire.a"),
    (same_classes, {"rpc/a.py": "class A: ...", "wire/b.py": "class A: ..."}, "class A in rpcbench.rpc.a, rpcbench"),
    (too_many_protocols, {"rpc/a.py": "class A(Protocol): ...\n" * 17}, "17 Protocols, at most 16"),
    (unclear, {"rpc/a.py": '"""Who holds it reads what comes."""'}, "free relatives in 1,000 words"),
    (vague_names, {"rpc/a.py": "def taken(): ..."}, "participles 1.000"),
    (vague_names, {"rpc/a.py": "def receive_inputs(): ...\ndef a_b(): ..."}, "length 8.5"),
    (uncommented, {"rpc/a.py": "x = 1\n" * 40 + "y = 2  # why"}, "1 comments in 42 lines"),
    (retired_words, {"rpc/a.py": "x = 1\n_starters = {}"}, "rpc.a:2 says starter, not fork server"),
    (retired_words, {"rpc/a.py": "# The zygote forks."}, "rpc.a:1 says zygote"),
    (headless, {"rpc/a.py": "x = 1"}, "rpc.a: no docstring"),
    (unpickling, {"rpc/a.py": "import pickle as p\np.loads(b'')"}, "rpc.a:2 unpickles"),
    (unpickling, {"rpc/a.py": "from cloudpickle import loads"}, "rpc.a:1 unpickles"),
    (unpickling, {"rpc/a.py": "import torch\ntorch.load"}, "rpc.a:2 unpickles"),
    (waiting_locked, {"rpc/a.py": "import threading\nthreading.Event()"}, "rpc.a:2 waits by threading.Event"),
    (waiting_locked, {"rpc/a.py": "import threading\nthreading.Condition()"}, "rpc.a:2 waits by threading.Condition"),
    (scripts, {"../extension/src/a.ts": "const a = 1;"}, "a.ts: no header"),
    (scripts, {"../extension/src/a.tsx": "// A.\nconst a = b as any;"}, "a.tsx:2 uses any"),
    (scripts, {"../extension/src/a.ts": "// A.\n" * 301}, "a.ts: 301 lines"),
    (namesakes, {"../tests/a/test_x.py": "", "../tests/b/test_x.py": ""}, "test_x.py: 2 files"),
    (hidden_errors, {"nn.py": "class A(nn.Module):\n    @property\n    def b(self): ..."}, "nn.A.b is a property"),
    (unlabelled, {"rpc/a.py": "call(name, f, own=True)"}, "rpc.a:1 is a call with own=True"),
    (missing_exports, {"rpc/a.py": "__all__ = ['gone']"}, "rpc.a.gone: AttributeError"),
    (missing_exports, {"rpc/a.py": "x = 1\n__all__ = ['x', 'x']"}, "stands twice"),
    (missing_exports, {"rpc/a.py": "import no_such_module"}, "rpc.a: ModuleNotFoundError"),
    (missing_exports, {"rpc/a.py": "import ray.none"}, "rpc.a: ModuleNotFoundError"),
]


def _plant(root: Path, files: dict[str, str]) -> None:
    for name, source in {"__init__.py": '"""The root."""\n', **files}.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


@pytest.mark.parametrize(("rule", "files", "breach"), CASES)
def test_each_rule_reports_a_breach(tmp_path: Path, rule: Rule, files: dict[str, str], breach: str) -> None:
    _plant(tmp_path, files)
    assert any(breach in line for line in rule(tmp_path)), rule(tmp_path)


def test_a_clean_tree_breaks_no_rule(tmp_path: Path) -> None:
    body = "x = 1\n" * SHORTEST_FILE + "# A reason.\n" * 5
    pickling = f'"""Reads pickles."""\nimport pickle\npickle.loads\n{body}'
    _plant(
        tmp_path,
        {
            "serialization/pickler.py": pickling,
            "protocol/calls.py": f'"""Pure."""\nimport enum\n{body}',
            "runtime.py": '"""Loads a pickle."""\nfrom rpcbench.serialization import pickler\n',
        },
    )
    assert {rule.__name__: rule(tmp_path) for rule in RULES} == {rule.__name__: [] for rule in RULES}
