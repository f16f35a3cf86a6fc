"""A notebook without a page: IPython with rpcbench in a process of its own, perhaps on another host.

Run as a script it runs the cells that it reads, one line of JSON each, and answers each with a line of JSON. It ends at
the end of its input, as a kernel does, with the clusters that it has started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

ADD_UP = """%%remote all
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) + dist.get_rank()
dist.all_reduce(x)
print("sum", x.item(), flush=True)
dist.destroy_process_group()"""


class Notebook:
    """The side of the test. `begin` and `answer` are the two halves of `run`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, cell: str) -> str:
        """Run a cell that succeeds, and return what it has shown."""
        self.begin(cell)
        shown, error = self.answer()
        assert not error, f"{error}\n{shown}"
        return shown

    def error_of(self, cell: str) -> str:
        """Run a cell that fails, and return the text of its error."""
        self.begin(cell)
        shown, error = self.answer()
        assert error, f"the cell did not fail: {shown}"
        return error

    def begin(self, cell: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(cell)}\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[str, str]:
        """Return what the oldest cell without an answer has shown, and its error, which is empty if it has none."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the notebook has ended"
        shown, error = json.loads(line)
        return shown, error


@contextmanager
def typed_notebook(entry: Sequence[str], env: Mapping[str, str]) -> Iterator[Notebook]:
    """A notebook in a process that this command begins."""
    command = [*entry, sys.executable, "-P", "-W", "ignore", __file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env={**os.environ, **env}, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield Notebook(process)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def main() -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is written here is no answer
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "rpcbench")
    for line in sys.stdin:
        with capture_output() as captured:
            done = shell.run_cell(json.loads(line))
        error = done.error_before_exec or done.error_in_exec
        said = "" if error is None else f"{type(error).__name__}: {error}"
        results = [output.data.get("text/plain", "") for output in captured.outputs]
        shown = "\n".join([captured.stdout, captured.stderr, *results])
        print(json.dumps([shown, said]), file=answers, flush=True)
    shell.run_cell("%cluster stop")


if __name__ == "__main__":
    main()
