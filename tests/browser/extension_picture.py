"""The pictures of the JupyterLab extension in the docs.

    PYTHONPATH=tests python tests/browser/extension_picture.py --shot docs/pictures/extension-light.png [--dark]
    PYTHONPATH=tests python tests/browser/extension_picture.py --of start --shot docs/pictures/start-page-light.png

The first: a cell runs in the notebook while the picture is taken, one worker is busy and one is lost.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
from pathlib import Path

from lab import LESSON, Lab, running

SHARE = """import rpcbench.rpc as rpc, torch
halves = [rpc.remote(f"worker{i}", torch.ones, args=(3, 3))
          for i in (1, 2, 2)]"""
BESIDE = "%%remote worker2 --async\nimport time\ntime.sleep(600)"
THERE = "%%remote worker1 -o y\ny = torch.eye(3)\ny.sum()"
TRAIN = "import time\nfor epoch in range(600):\n    print('epoch', epoch, end='\\r')\n    time.sleep(0.1)"


def of_sidebar(lab: Lab, to: Path) -> None:
    notebook = lab.open((SHARE, BESIDE, THERE, TRAIN), "model.ipynb", width=1600, height=600)
    page = notebook.page
    page.evaluate("jupyterapp.commands.execute('rpcbench:sidebar')")
    side = page.get_by_role("region", name="rpcbench: workers")
    side.get_by_label("Workers").fill("3")
    side.get_by_role("button", name="Start 3 workers").click()
    side.locator("[data-worker=worker3].rbx-ready").wait_for()
    notebook.value("1", after="%remote worker1 exec('import torch')")
    notebook.run_to_end(SHARE, BESIDE, THERE)
    os.kill(notebook.value("cluster.pid('worker3')"), signal.SIGKILL)
    notebook.run(TRAIN)
    notebook.output(TRAIN).filter(has_text="epoch").wait_for()
    side.get_by_role("button", name="rrefs", exact=True).click()
    page.locator(".rbx-tab [data-rref]").nth(2).wait_for()
    side.locator("[data-worker=worker2].rbx-busy").wait_for()
    side.locator("[data-worker=worker3].rbx-lost").wait_for()
    notebook.cell(THERE).locator(".cm-content").click()
    notebook.cell(THERE).get_by_label("Runs on").focus()
    page.screenshot(path=to)
    notebook.page.evaluate("jupyterapp.shell.currentWidget.sessionContext.session.kernel.interrupt()")


def of_start_page(lab: Lab, to: Path, width: int = 1440, height: int = 900) -> None:
    shutil.copytree(LESSON.parent, lab.folder / "notebooks", dirs_exist_ok=True)
    page = lab.visit("lab/tree/notebooks?", width, height, option="rpcbenchStart")
    page.locator(".jp-DirListing-item", has_text="00_pipeline").wait_for()
    page.wait_for_function("() => document.querySelectorAll('.rbx-card').length > 9")
    page.wait_for_function("() => [...document.querySelectorAll('.rbx-card img')].every(one => one.naturalWidth > 0)")
    page.screenshot(path=to)


OF = {"sidebar": of_sidebar, "start": of_start_page}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a picture of the JupyterLab extension.")
    parser.add_argument("--shot", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--of", choices=OF, default="sidebar")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), options.dark) as lab:
        OF[options.of](lab, options.shot)
