"""Run lessons and store what their cells show: `python docs/run_lessons.py [notebooks/01_hello_rpc.ipynb ...]`.

Stored outputs are for readers without a kernel; the tests run every cell anew and do not compare them. So nothing is
stored that differs from machine to machine without telling a reader anything: times of execution, state of widgets,
paths.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"
PATHS = re.compile(
    rf"{re.escape(str(ROOT))}/|{re.escape(sys.prefix)}/lib/python[\d.]+/(site-packages/)?|/tmp/(ipykernel_\d+|tmp\w+)/"
)


def run(path: Path) -> None:
    """Execute a lesson from its first cell to its last, and write it back."""
    notebook = nbformat.read(path, 4)
    client = NotebookClient(
        notebook, kernel_name="python3", record_timing=False, store_widget_state=False, coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )  # fmt: skip
    client.execute()
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec", "language_info")}
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)  # times, as JupyterLab keeps them
            cell.outputs = [output for output in cell.outputs if not is_bar(output)]
        for output in cell.get("outputs", ()):
            clean(output)
    nbformat.write(notebook, path)


def is_bar(output: nbformat.NotebookNode) -> bool:
    """Whether it is the widget of a progress bar of tqdm, of which only the beginning would be left: `0%|   | 0/20`."""
    data = output.get("data", {})
    return WIDGET in data and "%|" in "".join(data.get("text/plain", ""))


def clean(output: nbformat.NotebookNode) -> None:
    """Leave out what only this machine can know."""
    data = output.get("data", {})
    data.pop(WIDGET, None)
    for holder, key in ((output, "text"), (data, "text/plain"), (output, "traceback")):
        if isinstance(text := holder.get(key), str):
            holder[key] = PATHS.sub("", text)
        elif text:
            holder[key] = [PATHS.sub("", line) for line in text]


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or LESSONS:
        run(path)
        sys.stdout.write(f"{path} has run\n")
