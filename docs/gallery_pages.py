"""The pages of the gallery of silent bugs, from the list of kinds, their programs, and what was measured.

Guarantees
- A program is wrong as its file stands. Lines with `# wrong` are not in the right program; comments `# right:` are.
- Pages and pictures are functions of the kind, its program and its record, so a test can tell whether they are current.
- A record is one that `rpcbench.replay` plays. Beside the frames it keeps the losses, the report's text, and a digest
  of the program that gave them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from silent_bugs import KINDS, Kind

from rpcbench.base.charts import Picture
from rpcbench.panels import ComparePanel
from rpcbench.panels.replay import html_page
from rpcbench.telemetry.recording import Player, load_record

FOLDER = Path(__file__).parent / "silent-bugs"
WRONG = re.compile(r"^.*# wrong\b.*\n", re.MULTILINE)
RIGHT = re.compile(r"^( *)# right: ", re.MULTILINE)
MARKED = re.compile(r"# (?:wrong\b|right: )")
PROGRAM = re.compile(r"^```python\n((?:(?!```).*\n)*?.*# (?:wrong|right).*\n(?:(?!```).*\n)*)```$", re.MULTILINE)
PLAYER = "<!-- on the site the record plays here -->"
FRAME = """<figure class="record">
<iframe src="records/{name}.html" title="A record" sandbox="allow-scripts" loading="lazy"
style="height:{height}px"></iframe>
<figcaption>The two reports, which need no kernel: <em>Play</em> shows that of the right program, then that of the wrong
one, value by value. A click on a square shows its errors. <a href="records/{name}.html">On a page of its own</a>
</figcaption>
</figure>"""
START = "%load_ext rpcbench\n%cluster start {ranks}"
CALL = "cluster.compare(reference=(make_model, step), parallel=({make}, {step}), mesh={{{mesh}}})"
PAGE = """# {title}

{words}

![{told}](pictures/{name}.svg)

{curves} ({training})

## The program

A line with `# wrong` is wrong. A comment `# right:` has the line that stands there in the right program. In a notebook:

```python
{start}
```
```python
{program}```
```python
{call}
```

## The report

```text
{report}
```

{player}

## Others of this kind

The tests of [the comparison](../compare.md) have {count} of this kind, each with its right twin: {others}.
"""
INDEX = """# Silent bugs

A parallel program that is wrong rarely fails: all shapes are right, and the loss goes down. Each page has a short
program with one mistake, its loss beside that of the right program, and the report of
[`cluster.compare`](../compare.md), which names the first wrong tensor and the cause. The kinds are those of {count}
wrong programs in the tests of the comparison.

The solid line is the loss of the right program, the dashed one that of the wrong program, in {steps} steps. In {lower}
of the {all} kinds the wrong program ends with the lower loss.

<div class="gallery">

| | |
|---|---|
{rows}

</div>
"""


# -- programs
def program_text(kind: Kind, right: bool = False) -> str:
    """The program of a kind, or its right twin."""
    text = (FOLDER / "programs" / f"{kind.name}.py").read_text()
    return RIGHT.sub(r"\1", WRONG.sub("", text)) if right else text


def names_on_ranks(kind: Kind) -> tuple[str, str]:
    """The functions that make the model and take a step on the ranks."""
    make, step = ((name if f"def {name}(" in program_text(kind) else "") for name in ("make_on_ranks", "step_on_ranks"))
    return make or "make_model", step or "step"


def digest(kind: Kind) -> str:
    return hashlib.sha256(program_text(kind).encode()).hexdigest()[:12]


def mark_lines(text: str) -> str:
    """A page whose program, for the site, has its wrong and right lines marked."""
    return PROGRAM.sub(_mark_block, text)


def _mark_block(block: re.Match[str]) -> str:
    lines = [str(n) for n, line in enumerate(block[1].splitlines(), 1) if MARKED.search(line)]
    return f"```{{code-block}} python\n:emphasize-lines: {','.join(lines)}\n\n{block[1]}```"


# -- pages
def page(kind: Kind) -> str:
    """The page of a kind."""
    about, (make, step) = about_of(kind), names_on_ranks(kind)
    losses, ranks = about["losses"], _count_ranks(kind)
    mesh = ", ".join(f'"{name}": {size}' for name, size in kind.mesh.items())
    return PAGE.format(
        title=kind.title, words=kind.words, name=kind.name, told=_tell(losses), curves=kind.curves,
        training=_training(kind, len(losses["right"])), start=START.format(ranks=ranks), program=program_text(kind),
        call=CALL.format(make=make, step=step, mesh=mesh), report=about["report"], player=PLAYER,
        count="one program" if len(kind.corpus) == 1 else f"{len(kind.corpus)} programs",
        others=", ".join(name.replace("_", " ") for name in kind.corpus),
    )  # fmt: skip


def _count_ranks(kind: Kind) -> int:
    count = 1
    for size in kind.mesh.values():
        count *= size
    return count


def _training(kind: Kind, steps: int) -> str:
    own = "the program's own SGD" if kind.optimizer is None else "{} with a rate of {}".format(*kind.optimizer)
    shown = "the loss of the last stage" if "pp" in kind.mesh else "the mean of the losses that they return"
    return f"{steps} steps of {own} on {_count_ranks(kind)} ranks; {shown}."


def _tell(losses: Mapping[str, Sequence[float]]) -> str:
    ends = ", ".join(f"{name}: {values[0]:.3g} to {values[-1]:.3g}" for name, values in losses.items())
    return f"Loss of the two programs. {ends}"


def index() -> str:
    """The page of all kinds."""
    rows = [
        f"| [![{_tell(about_of(kind)['losses'])}](pictures/{kind.name}-small.svg)]({kind.name}.md) "
        f"| [**{kind.title}**]({kind.name}.md) <br> {kind.line} |"
        for kind in KINDS
    ]
    losses = [about_of(kind)["losses"] for kind in KINDS]
    return INDEX.format(
        count=sum(len(kind.corpus) for kind in KINDS), steps=len(losses[0]["right"]), rows="\n".join(rows),
        lower=sum(each["wrong"][-1] < each["right"][-1] for each in losses), all=len(KINDS),
    )  # fmt: skip


def with_player(text: str, name: str) -> str:
    """The page of a kind as the site shows it: with the player of its record, and lines of its program marked."""
    if not (path := FOLDER / "records" / f"{name}.json").exists():
        return text  # the page of all kinds
    text = mark_lines(text).replace("```text\n", "```{code-block} text\n:class: report\n\n", 1)
    player = Player(record := load_record(path))
    player.go_to_frame(len(record.frames) - 1)
    rows = len(ComparePanel.look(player.world())["modules"])
    return text.replace(PLAYER, FRAME.format(name=name, height=570 + 24 * rows))


# -- records
def record_path(kind: Kind) -> Path:
    return FOLDER / "records" / f"{kind.name}.json"


def about_of(kind: Kind) -> dict[str, Any]:
    """What a record says beside its frames: `losses`, `report`, `made_from`."""
    about: dict[str, Any] = json.loads(record_path(kind).read_text())
    return about


def write_players(folder: Path) -> None:
    """Write the pages that play the records."""
    folder.mkdir(parents=True)
    for kind in KINDS:
        html = html_page(load_record(record_path(kind)), ComparePanel)
        title = f"<title>{escape(kind.title)}: a record</title>"
        (folder / f"{kind.name}.html").write_text(html.replace("<title>rpcbench</title>", title))


# -- pictures
COLOURS = {"right": "green", "wrong": "red dashed"}


def picture(kind: Kind) -> str:
    """The two curves, with axes, as SVG."""
    losses = about_of(kind)["losses"]
    left, top, wide, high = 48, 34, 540, 170
    drawn = Picture(left + wide + 112, kind.title, _tell(losses))
    drawn.draw_text(12, 20, "loss", "note")
    most = max(map(max, losses.values()))
    for mark in _marks(most):
        y = top + high * (1 - mark / most)
        drawn.draw_line(left, y, left + wide, y, "rule")
        drawn.draw_text(left - 8, y + 4, f"{mark:g}", "note end")
    count = len(losses["right"])
    for step in range(0, count + 1, 20):
        drawn.draw_text(left + wide * step / count, top + high + 20, step or "step 0", "note middle")
    _draw_curves(drawn, losses, left, top, wide, high)
    ends = {name: top + high * (1 - values[-1] / most) + 4 for name, values in losses.items()}
    apart = (
        max(0.0, 17 - abs(ends["right"] - ends["wrong"])) / 2
    )  # so that words of near ends stand one below the other
    above = "wrong" if ends["wrong"] <= ends["right"] else "right"
    for name, y in ends.items():
        words = f"{name} {losses[name][-1]:.3g}"
        drawn.draw_text(
            left + wide + 10, y - apart if name == above else y + apart, words, f"f-{COLOURS[name].split()[0]}"
        )
    return drawn.svg() + "\n"


def _marks(most: float) -> list[float]:
    """Round numbers from 0 to the largest loss, three to seven."""
    step = next(step for step in (0.25, 0.5, 1.0, 2.0) if most / step < 7)
    return [step * n for n in range(int(most / step) + 1)]


def thumbnail(kind: Kind) -> str:
    """The two curves alone, as a small SVG."""
    losses = about_of(kind)["losses"]
    drawn = Picture(220, kind.title, _tell(losses))
    drawn.draw_rect(0, 0, 220, 74, "paper")  # one height for all
    _draw_curves(drawn, losses, 8, 10, 204, 62)
    return drawn.svg() + "\n"


def _draw_curves(
    drawn: Picture, losses: Mapping[str, Sequence[float]], left: float, top: float, wide: float, high: float
) -> None:
    most = max(map(max, losses.values()))
    for name, values in losses.items():
        places = [(left + wide * n / len(values), top + high * (1 - each / most)) for n, each in enumerate(values, 1)]
        drawn.draw_curve(places, f"s-{COLOURS[name]}")


def files() -> dict[Path, str]:
    """All pages and pictures, by path."""
    made = {FOLDER / "README.md": index()}
    for kind in KINDS:
        made[FOLDER / f"{kind.name}.md"] = page(kind)
        made[FOLDER / "pictures" / f"{kind.name}.svg"] = picture(kind)
        made[FOLDER / "pictures" / f"{kind.name}-small.svg"] = thumbnail(kind)
    return made
