"""A cell of the notebook's own that runs on a thread, beside what the notebook does.

Its output is shown in the cell that began it, its names are the notebook's, and the value of its last line is shown as
any cell's. No thread can be stopped from outside: it ends when its code does.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, cast

from rpcbench.launch.screen import Screen
from rpcbench.launch.tracebacks import of_user, shown_as

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

HERE = "notebook"


class Beside:
    """`answer` runs the cell, on the thread that asks. SyntaxError at once where it is none."""

    def __init__(self, shell: InteractiveShell, screen: Screen, code: str) -> None:
        self._shell = shell
        self._screen = screen
        self._state = "runs"
        text = cast(Any, shell).transform_cell(code)
        name = cast(Any, shell.compile).cache(text, shell.execution_count, raw_code=code)  # for lines of tracebacks
        tree = ast.parse(text, name)
        self._value = None
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            tree.body.pop()
            self._value = compile(ast.Expression(last.value), name, "eval")
        self._code = compile(tree, name, "exec")

    def answer(self) -> None:
        """Its error is raised, to be shown as IPython shows errors."""
        try:
            self._screen.within(self._run)
        except BaseException as error:  # noqa: BLE001  (whatever the cell raised)
            self._state = type(error).__name__
            frames = of_user(error.__traceback__)
            lines = cast(Any, self._shell.InteractiveTB).structured_traceback(type(error), error, frames)
            raise shown_as(error, lines) from None
        self._state = "done"

    def _run(self) -> None:
        from IPython.display import display

        space = self._shell.user_ns
        exec(self._code, space)
        if self._value is not None and (value := eval(self._value, space)) is not None:
            display(value)  # type: ignore[no-untyped-call]

    def states(self) -> dict[str, str]:
        return {HERE: self._state}

    def interrupt(self) -> None:
        raise RuntimeError(
            "a cell of the notebook's own cannot be interrupted while it runs beside it: let its messages go, with "
            "stepper.go(), and it comes to its end"
        )
