"""Write the API reference from the docstrings: `python docs/make_reference.py`, or `make docs`.

One page for each public module, one section for each name, in the order of `__all__`. A name that several modules offer
is described once, on the page of the first that lists it. Nothing is written by hand in `docs/api`; the tests fail when
a page is not what this would write.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, wherever the command is typed
import torch_names  # noqa: E402  (it loads this checkout, too)

API = ROOT / "docs" / "api"
PAGES = ["errors", "rpc", "autograd", "optim", "nn", "pipeline", "distributed", "named", "testing", ""]  # "": all
HOMES = {"errors": "rpcbench.base.errors"}
WIDTH = 110
PLAIN = (str, int, float, timedelta)  # constants that are shown with their value
MAGICS = "rpcbench.notebook.magics"
COMMAND = "python docs/make_reference.py"
SECTION = "(?:Args|Attributes|Returns|Yields|Raises)"
FOR_THE_RUNTIME = ("For the runtime", "Runtime only")  # docstrings of what is public among modules only


def pages() -> dict[str, str]:
    """{file name: text} of all pages."""
    described: dict[int, str] = {}
    texts = {}
    for page in PAGES:
        if importlib.util.find_spec(_module(page)) is not None:
            texts[_file(page)] = _page(page, described)
    texts["notebook.md"] = _magics()
    texts["workers-panel.md"] = _columns()
    texts["panel-json.md"] = _panel_fields()
    texts[torch_names.FILE] = torch_names.page(API / torch_names.FILE)
    texts["README.md"] = _index(dict(reversed(texts.items())))
    return texts


def names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public names of a module, in the order of its `__all__`."""
    for name in module.__all__:
        value = getattr(module, name)
        if not name.startswith("_") and not isinstance(value, TypeVar):
            yield name, value


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class and of its bases in this package, if they say what they do."""
    seen: set[str] = set()
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.split(".")[0] == "rpcbench" else ():
            plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if name.startswith("_") or name in seen or not isinstance(plain, FunctionType | property):
                continue
            seen.add(name)
            if (doc := _doc(plain)) and not doc.startswith(FOR_THE_RUNTIME):
                yield name, plain


def describe(module: ModuleType, name: str) -> str:
    """The docstring of a name; that of a constant is the string below its assignment, in the module that makes it."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        return _source_doc(value)
    body = ast.parse(inspect.getsource(module)).body
    for node, below in pairwise(body):
        match node:
            case ast.ImportFrom(module=str(home)) if name in [alias.name for alias in node.names]:
                return describe(importlib.import_module(home), name)
            case ast.Assign(targets=[ast.Name(id=made)]) | ast.AnnAssign(target=ast.Name(id=made)) if made == name:
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        return inspect.cleandoc(text)
    return ""


def _module(page: str) -> str:
    return HOMES.get(page, f"rpcbench.{page}".rstrip("."))


def _file(page: str) -> str:
    return f"{page or 'rpcbench'}.md"


# -- pages
def _page(page: str, described: dict[int, str]) -> str:
    module = importlib.import_module(_module(page))
    text = Text(_file(page), "Errors" if page == "errors" else f"`{_module(page)}`", module)
    text.add(_prose(_doc(module)), _where(module))
    # Those with several names are described under their own.
    offered = sorted(names(module), key=lambda each: getattr(each[1], "__name__", each[0]) != each[0])
    also = []
    for name, value in offered:
        if id(value) in described:
            also.append(f"[{name}]({described[id(value)]})")
        elif not isinstance(value, ModuleType):
            _section(text, name, value, describe(module, name), described)
    for name, value in offered:
        if isinstance(value, ModuleType):
            _submodule(text, name, value, described)
    text.add(f"Also offered here: {', '.join(also)}." if also else "")
    return str(text)


def _submodule(text: Text, name: str, module: ModuleType, described: dict[int, str]) -> None:
    inner = [(found, value) for found, value in names(module) if id(value) not in described]
    for found, value in inner:
        if callable(value):
            _section(text, f"{name}.{found}", value, describe(module, found), described)
    rows = "".join(f"\n| `{found}` | `{value!r}` |" for found, value in inner if isinstance(value, PLAIN))
    if rows:
        text.heading(name, 2)
        text.add(_prose(_doc(module)), f"| name | value |\n|---|---|{rows}")


def _section(text: Text, name: str, value: Any, doc: str, described: dict[int, str]) -> None:
    described[id(value)] = text.heading(name, 2)
    source = "" if inspect.getmodule(value) is text.module else _where(value)
    text.add(_signature(name, value), _prose(doc), source)
    if inspect.isclass(value):
        fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        text.add(f"Fields: {', '.join(f'`{field}`' for field in fields)}." if fields else "")
        for member, inner in members(value):
            text.heading(f"{name}.{member}", 3)
            text.add(_signature(member, inner), _prose(_doc(inner)))


def _magics() -> str:
    module = importlib.import_module(MAGICS)
    text = Text("notebook.md", "In a notebook", module)
    text.add("`%load_ext rpcbench` makes these known to a notebook.", _where(module))
    kinds = (module.ClusterMagics, module.DebugMagics, module.FaultMagics, module.TraceMagics)
    kinds += (module.ProfileMagics, module.RecordMagics)
    names = ["%cluster", "%%remote", "%autoremote", "%debug", "%panel", "%%step", "%chaos"]
    names += ["%%trace", "%%profile", "%record"]
    for magic in names:
        text.heading(magic, 2)
        name = magic.lstrip("%")
        text.add(_prose(_doc(next(getattr(kind, name) for kind in kinds if name in vars(kind)))))
    return str(text)


def _columns() -> str:
    rows = importlib.import_module("rpcbench.telemetry.worker_columns").WORKER_COLUMNS
    return "\n".join(
        [
            "# The workers panel",
            "",
            "The columns of the panel of workers, `%panel workers`, and what each shows.",
            "",
            "| column | what it shows |",
            "|---|---|",
            *(f"| {row.head} | {row.help} |" for row in rows),
            "",
        ]
    )


def _panel_fields() -> str:
    schema = importlib.import_module("rpcbench.telemetry.panel_json")
    kinds = {**importlib.import_module("rpcbench.panels").ALL_PANELS}
    kinds["step"] = importlib.import_module("rpcbench.panels.step").StepPanel
    parts = [_PANEL_HEAD.format(format=schema.FORMAT, version=schema.VERSION)]
    for name, sections in schema.PANEL_SHAPES.items():
        parts.append(f"## {name}\n\n{textwrap.fill(' '.join(_view_words(kinds[name].look).split()), WIDTH)}")
        rows = [f"| `{key}` | {_field_list(schema, shape)} |" for key, shape in sections.items()]
        parts.append("\n".join([*_SECTIONS, *rows]))
    return "\n\n".join([*parts, *_state_fields(schema)]) + "\n"


def _state_fields(schema: ModuleType) -> Iterator[str]:
    state = importlib.import_module("rpcbench.telemetry.cluster_state")
    yield _STATE_HEAD.format(format=state.STATE_FORMAT, version=state.STATE_VERSION)
    for function in (state.read_state, state.read_job_state, state.describe_process):
        yield textwrap.fill(" ".join(_doc(function).split()), WIDTH)
    rows = [f"| `{key}` | {_field_list(schema, shape)} |" for key, shape in state.STATE_SHAPES.items()]
    yield "\n".join([*_SECTIONS, *rows])


def _view_words(look: FunctionType) -> str:
    """The docstring of a view, with the values of the constants that it names."""

    def tell(found: re.Match[str]) -> str:
        value = look.__globals__[found[1]]
        if isinstance(value, int):
            return f"{value:,}"
        keys = [value] if isinstance(value, str) else [getattr(each, "key", each) for each in value]
        return ", ".join(f"`{key}`" for key in keys)

    return re.sub(r"`([A-Z_]{2,})`", tell, _doc(look))


def _field_list(schema: ModuleType, shape: dict[str, Any]) -> str:
    """The fields by their types, so that each type is named once."""
    by_type: dict[str, list[str]] = {}
    for field, words in schema.describe_fields(shape):
        by_type.setdefault(words, []).append(f"`{field}`")
    return "; ".join(f"{words}: {', '.join(fields)}" for words, fields in by_type.items())


_SECTIONS = ["| section | fields of a row |", "|---|---|"]
_STATE_HEAD = """## rpcbench state

`rpcbench state --json` prints one object: `format`, "{format}"; `version`, {version}; `at` and `epoch` as above, so
a collective began `begin` seconds after `epoch`; `cluster`; and `sections`."""
_PANEL_HEAD = """# Panels and states as JSON

`rpcbench.panel(NAME).json()` returns this as a dict, as does `rpcbench.replay(FILE).json()`.

| field | value |
|---|---|
| `format` | "{format}" |
| `version` | {version}; it changes where a field goes or means something else, and not with a new field |
| `panel` | the name of the panel |
| `phase` | "live", "stopped", "record" or "simulated" |
| `at` | the moment that it shows, in seconds since 1970; null of a record or a simulated world |
| `epoch` | times in rows count from here, in seconds since 1970, unless the text below says more; null: unknown |
| `sections` | by name of a section: its rows, by key |

Members are named by their ids: `workers` has the name of each, and 0 is the notebook. Bytes are integers, times and
durations are numbers of seconds, and shares are numbers from 0 to 1."""


def _index(texts: dict[str, str]) -> str:
    table = ["| page | what it has |", "|---|---|"]
    for file, text in texts.items():
        title = text.partition("\n")[0].removeprefix("# ")
        table.append(f"| [{title}]({file}) | {', '.join(re.findall(r'^## (.+)$', text, re.MULTILINE))} |")
    return f"# API reference\n\nMade from the docstrings by `{COMMAND}`.\n\n{chr(10).join(table)}\n"


class Text:
    """A page that grows; knows the anchors of its headings, as GitHub makes them."""

    def __init__(self, file: str, title: str, module: ModuleType) -> None:
        self.file = file
        self.module = module
        self.parts = [f"# {title}"]
        self.anchors: Counter[str] = Counter()

    def heading(self, text: str, level: int) -> str:
        """Where the heading can be found."""
        self.parts.append(f"{'#' * level} {text}")
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        self.anchors[anchor] += 1
        again = self.anchors[anchor] - 1
        return f"{self.file}#{anchor}{f'-{again}' if again else ''}"

    def add(self, *parts: str) -> None:
        self.parts += [part for part in parts if part]

    def __str__(self) -> str:
        return "\n\n".join(self.parts) + "\n"


# -- pieces
def _doc(value: Any) -> str:
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")


def _source_doc(value: Any) -> str:
    """The docstring as it stands in the source: a function's help may add the text that many share."""
    node = _node(value) if isinstance(value, FunctionType) and value.__module__.startswith("rpcbench.") else None
    return (node and ast.get_docstring(node)) or _doc(value)


def _prose(doc: str) -> str:
    """A docstring as Markdown: examples in a fence, arguments and errors as lists, all else unchanged."""
    parts = []
    for part in re.split(r"\n{2,}(?! )", re.sub(rf"\n(?={SECTION}:\n)", "\n\n", doc)):
        example = textwrap.dedent(part).startswith(">>>")
        if example:
            parts.append(f"```python\n{textwrap.dedent(part)}\n```")
        else:
            parts.append(_list(part) if re.match(rf"{SECTION}:\n", part) else part)
    return "\n\n".join(parts)


def _list(section: str) -> str:
    """A section of a docstring, such as `Args:`, as a list: an item for each line with the least indentation."""
    title, _, text = section.partition("\n")
    text = re.sub(r"\n\s+", " ", textwrap.dedent(text))
    items = [re.sub(r"^([\w*, .]+?):", r"`\1`:", line) for line in text.splitlines()]
    return f"{title}\n\n" + "\n".join(f"- {item}" for item in items)


def _where(value: Any) -> str:
    try:
        path = Path("rpcbench") / Path(inspect.getsourcefile(value) or "").relative_to(ROOT / "rpcbench")
    except (TypeError, ValueError):
        return ""
    return f"Source: [{path}](../../{path})"


def _signature(name: str, value: Any) -> str:
    """As it stands in the source, so that defaults keep their names."""
    if isinstance(value, property):
        return ""
    function = value
    if inspect.isclass(value):
        made = vars(value).get("__init__")
        if made is None or dataclasses.is_dataclass(value):
            return ""
        function = made
    if (node := _node(function)) is None:
        return ""
    text = _call(name, node.args, node.returns if not inspect.isclass(value) else None)
    return f"```python\n{text}\n```"


def _node(function: Any) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A function's source, also of one that a decorator has wrapped; None for one that has none."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, ValueError):
        return None
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


def _call(name: str, arguments: ast.arguments, returns: ast.expr | None) -> str:
    result = f" -> {ast.unparse(returns)}" if returns is not None else ""
    parts = [*_each(arguments)]
    if parts[:1] in (["self"], ["cls"]):
        del parts[0]
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= WIDTH:
        return line
    lines = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{lines}){result}"


def _each(arguments: ast.arguments) -> Iterator[str]:
    """One text for each parameter."""
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        yield _parameter(argument, default)
    if arguments.vararg is not None or arguments.kwonlyargs:
        yield f"*{ast.unparse(arguments.vararg)}" if arguments.vararg is not None else "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation is not None else "="  # as formatters want it
    return ast.unparse(argument) + (f"{equals}{ast.unparse(default)}" if default is not None else "")


if __name__ == "__main__":
    API.mkdir(exist_ok=True)
    made = pages()
    for old in API.glob("*.md"):
        old.unlink()
    for name, text in made.items():
        (API / name).write_text(text)
    sys.stdout.write(f"{len(list(API.iterdir()))} pages written to {API.relative_to(ROOT)}\n")
