"""Draw the states of objects from their tables of transitions: `python docs/make_states.py`.

A document has a drawing between two comments. `DRAWINGS` names the class of each, and what makes its first state. An
event without an effect has no arrow; the line below the drawing lists these.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, wherever the command is typed

from rpcbench.base.state_machine import StateMachine  # noqa: E402
from rpcbench.pipeline import exchange  # noqa: E402
from rpcbench.protocol import rrefs  # noqa: E402

FOLDER = ROOT / "docs" / "internals"
DRAWINGS: dict[type[StateMachine[Any, Any]], tuple[str, Mapping[Any, str]]] = {
    rrefs.User: (
        "journey-of-a-rref.md",
        {rrefs.PENDING: "from another user, or created", rrefs.CONFIRMED: "from the owner"},
    ),
    rrefs.Owned: (
        "journey-of-a-rref.md",
        {rrefs.NAMED: "a fork, a name or the Create comes", rrefs.READY: "the owner shares a value of its own"},
    ),
    exchange.StepLife: ("journey-of-a-step.md", {exchange.RUNNING: "call run_step"}),
}


def draw(machine: type[StateMachine[Any, Any]]) -> str:
    """The drawing of a machine, and the events that it ignores."""
    arrows: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    ignored: defaultdict[str, list[str]] = defaultdict(list)
    for state, row in machine.transitions.items():
        for event, after in row.items():
            if after is state:
                ignored[phrase(event)].append(state)
            else:
                arrows[state, after].append(phrase(event))
    begins = [f"[*] --> {state}: {why}" for state, why in DRAWINGS[machine][1].items()]
    lines = [f"{state} --> {after}: {', '.join(events)}" for (state, after), events in arrows.items()]
    left = {state for state, _ in arrows}
    ends = [f"{state} --> [*]" for state in dict.fromkeys(after for _, after in arrows) if state not in left]
    drawing = "\n".join(f"    {line}" for line in [*begins, *lines, *ends])
    without = "; ".join(f"*{event}* in {', '.join(states)}" for event, states in ignored.items())
    return f"```mermaid\nstateDiagram-v2\n{drawing}\n```\n\nWithout effect: {without}.\n"


def phrase(event: str) -> str:
    """An event as the documents write it."""
    return event.replace("_", " ")


def with_drawings(page: str) -> str:
    """The text of a page with its drawings as the tables have them."""
    text = (FOLDER / page).read_text()
    for machine, (where, _) in DRAWINGS.items():
        if where == page:
            begin, end = f"<!-- docs/make_states.py draws {machine.__name__} -->\n", "<!-- end -->\n"
            text, count = re.subn(f"{begin}.*?{end}", lambda _: begin + draw(machine) + end, text, flags=re.DOTALL)  # noqa: B023
            assert count == 1, f"{page} has {count} places for {machine.__name__}"
    return text


if __name__ == "__main__":
    for page in sorted({page for page, _ in DRAWINGS.values()}):
        (FOLDER / page).write_text(with_drawings(page))
