"""The exercises of lessons, tried while nbval runs the lesson: every stored answer, in the lesson's own kernel.

In a notebook the cell tagged `exercise:NAME` waits for an answer, and the one tagged `check:NAME` tries it. The check
must refuse the empty answer and plausible wrong ones, each with its own hint, and take the right one. With that one in
place the lesson goes on.

The right answer is the stored solution, which `check.solution()` shows. Wrong answers lie in `lessons/answers`, one
file for each lesson: the title of each names its mistake, and, after the bar, a part of the message that a learner
should get. There may be other right answers, too. Beneath its title an answer is either a whole program, or the changes
that make it of the solution (in the exam: of the first right answer) or, beneath a title that begins with `# %%%`, of
the last whole program above it, one after another:

    # old => new          a part of one line; the old text stands once in the solution
    # - old line          whole lines, with their indentation, and those that take their place
    # + new line

The first line of the solution with another body is written `# => statement` for each line of the body.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

LESSONS = Path(__file__).parents[1] / "notebooks"
ANSWERS = Path(__file__).parent / "lessons" / "answers"
TITLE = re.compile(
    r"^# %%(?P<of_above>%?) (?P<exercise>\w+): (?P<kind>right|wrong)(?P<what>[^|\n]*)(\| (?P<hint>.+))?$", re.MULTILINE
)
CHANGE = re.compile(r"(?P<removed>(?:# -.*\n)+)(?P<added>(?:# \+.*\n)*)|# (?P<old>\S.*) => (?P<new>.+)\n")
EMPTY_HINT = "Replace the three dots"
MODULE = re.compile(r"from checks import (\w+) as check")
SECONDS = 400  # for a cell and for an attempt: lesson 35 plays 256 ranks, which takes 30 to 60 s on two idle cores
os.environ["RPCBENCH_PROGRESS"] = ""  # what the tests solve is not the reader's progress


@dataclass(frozen=True)
class Answer:
    exercise: str
    what: str
    code: str
    hint: str | None  # None: it is right


def stored(lesson: str) -> list[Answer]:
    """The answers to a lesson's exercises."""
    path = ANSWERS / f"{lesson}.py"
    text = path.read_text() if path.exists() else ""
    titles = [*TITLE.finditer(text)]
    ends = [title.start() for title in titles[1:]] + [len(text)]
    answers, right = [], solutions(lesson)
    above: dict[str, str] = {}  # the last whole program for each exercise
    for title, end in zip(titles, ends, strict=False):  # without titles there is still one end
        what, code = (title["kind"] + title["what"]).strip(), text[title.end() : end].strip()
        if code.startswith("# => "):
            header = right[title["exercise"]].partition("\n")[0]
            code = above[title["exercise"]] = header + "\n" + re.sub("^# => ", "    ", code, flags=re.MULTILINE)
        elif code and all(line.startswith("# ") for line in code.splitlines()):
            bases = above if title["of_above"] else right
            code = changed(bases[title["exercise"]], code, f"{path.name}: {title[0]}")
        else:
            above[title["exercise"]] = code
        right.setdefault(title["exercise"], code)
        answers.append(Answer(title["exercise"], what, code, title["hint"]))
    return answers + [Answer(name, "solution", code, None) for name, code in solutions(lesson).items()]


def changed(solution: str, changes: str, where: str) -> str:
    """The solution with the changes made, in their order."""
    code, changes = f"\n{solution}\n", changes + "\n"
    if unread := CHANGE.sub("", changes).strip():
        raise ValueError(f"{where}: write `# old => new`, or `# - ` and `# + ` before whole lines, not {unread!r}")
    for change in CHANGE.finditer(changes):
        if change["old"]:
            old, new = change["old"], change["new"]
        else:
            old, new = ("\n" + re.sub("^# [-+] ?", "", change[kind], flags=re.M) for kind in ("removed", "added"))
        if (times := code.count(old)) != 1:
            told = f"{old.strip()!r} is {times} times in the program"
            raise ValueError(f"{where}: {told}; name a text that is there once")
        code = code.replace(old, new)
    return code.strip()


def solutions(lesson: str) -> dict[str, str]:
    """The stored solutions of a lesson, as its check shows them."""
    if (found := MODULE.search((LESSONS / f"{lesson}.ipynb").read_text())) is None:
        return {}
    path = LESSONS / "checks" / "solutions" / f"{found[1]}.py"
    if not path.exists():  # the exam's are in `lessons/answers`
        return {}
    parts = re.split(r"^# %% (\w+)\n", path.read_text(), flags=re.MULTILINE)
    return {name: code.strip() for name, code in zip(parts[1::2], parts[2::2], strict=True)}


def tagged(cell: Any, kind: str) -> str | None:
    """NAME of a cell tagged `kind:NAME`."""
    names = [tag.partition(":")[2] for tag in cell.metadata.get("tags", ()) if tag.startswith(f"{kind}:")]
    return names[0] if names else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Behind each check of a lesson, as tests of their own, come the answers to its exercise; the right one last."""
    report = yield
    if isinstance(collector, IPyNbFile) and collector.path.parent == LESSONS and report.passed:
        answers = sorted(stored(collector.path.stem), key=lambda answer: answer.hint is None)
        report.result = [item for cell in report.result for item in _with_attempts(cell, answers)]
        for item in report.result:
            item.add_marker(pytest.mark.timeout(SECONDS + 60))  # else it would end before the cell's own limit
    return report


def _with_attempts(cell: IPyNbCell, answers: list[Answer]) -> Iterator[pytest.Item]:
    yield cell
    if (name := tagged(cell.cell, "check")) is not None:
        yield Attempt.on(cell, Answer(name, "empty", "", EMPTY_HINT))
        yield from (Attempt.on(cell, answer) for answer in answers if answer.exercise == name)


class Attempt(pytest.Item):
    """One answer, tried by the check."""

    answer: Answer
    check: str

    @classmethod
    def on(cls, cell: IPyNbCell, answer: Answer) -> Attempt:
        made: Attempt = cls.from_parent(cell.parent, name=f"{cell.name}: {answer.exercise}, {answer.what}")
        made.answer, made.check = answer, cell.cell.source
        return made

    def runtest(self) -> None:
        if self.answer.code:
            assert self._run(self.answer.code)[0] == "", "the answer itself fails"
        error, text = self._run(self.check)
        if self.answer.hint is None:
            assert (error, text[:6]) == ("", "Right."), text
        else:
            assert error == "NotYet", text
            assert self.answer.hint in text, text
            own = re.sub(r"(?m)^\[worker\d+\].*$", "", text)  # a worker that a check interrupts may print its traceback
            assert "Traceback" not in own, text
            assert "On RANK" not in text, text  # `on_ranks` puts in the rank

    def _run(self, code: str) -> tuple[str, str]:
        """Return the name of the error, empty if there is none, and all text that is shown."""
        shown: list[str] = []

        def show(message: dict[str, Any]) -> None:
            content = message["content"]
            shown.append(content.get("text", "") + "\n".join(content.get("traceback", ())))

        client = self.parent.kernel.kc  # type: ignore[union-attr]
        reply = client.execute_interactive(
            code, store_history=False, allow_stdin=False, stop_on_error=False, timeout=SECONDS, output_hook=show
        )
        return reply["content"].get("ename", ""), "".join(shown)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name
