"""What a user of JupyterLab sees: panels that move while a cell trains, a stop button that works, nothing left."""

from __future__ import annotations

import nbformat
import psutil
import pytest
from lab import LESSON, SECONDS, settles

pytestmark = [pytest.mark.browser, pytest.mark.process, pytest.mark.timeout(400)]

TRAIN, HAND, STOP = "pipe.step(x[batch]", "dist_autograd.backward(", "%cluster stop"
TRAIN_ON = """
import pathlib
while not pathlib.Path({!r}).exists():
    for batch in torch.randperm(len(x)).split(128):
        pipe.step(x[batch], y[batch])"""
# While the cell runs. In the RRefs panel only the ages change, once a second.
CHANGES = {"Pipeline": 2, "Autograd contexts": 2, "RRefs": 1}

# Keeps, for each panel, the pictures that came one after another while the cell ran. The prompt of such a cell shows a
# star; so does that of a cell that waits for its turn, but it has shown nothing yet.
WATCH = """index => {
  const [prompt, output] = ['.jp-InputPrompt', '.jp-OutputArea-output'];
  window.runs = () => {
    const cell = document.querySelectorAll('.jp-Notebook .jp-Cell')[index]; // the page may still open the notebook
    return cell?.querySelector(prompt)?.textContent === '[*]:' && cell.querySelector(output) !== null;
  };
  window.seen = {};
  setInterval(() => {
    for (const panel of runs() ? document.querySelectorAll('.rb-panel') : []) {
      const pictures = (window.seen[panel.getAttribute('aria-label')] ??= []);
      const picture = panel.querySelector('.rb-picture').innerHTML.replaceAll(' rb-new', '');
      if (pictures.at(-1) !== picture) pictures.push(picture);
    }
  }, 50);
}"""
MOVED = "least => Object.entries(least).every(([panel, count]) => seen[panel]?.length > count)"

TITLES = """all => Object.fromEntries(all.map(e => {
  const lines = e.querySelector('title').textContent.split('\\n').filter(line => !line.includes(' in tensors'));
  return [e.dataset.rref, [lines.join('\\n'), e.dataset.size ?? '']];
}))"""
TABLES = "{0: cluster.agent.tables(), **{i: cluster.rpc_sync(f'worker{i}', tables) for i in (1, 2)}}"
ASK = "from rpcbench.runtime.current import current_agent\ndef tables():\n    return current_agent().tables()\n"


def first_number(page, panel):
    """What the head line of a panel counts first, in its words."""
    return page.locator(f".rb-{panel} .rb-stat b").first.inner_text().strip()


def rref_words(tables):
    """What the rows of the RRef panel say, made from what owners and users hold."""
    held = {row["rref"]: (holder, row) for holder, own in tables.items() for row in own["users"].values()}
    words = {}
    for owner, own in tables.items():
        for rref, row in own["owned"].items():
            holder, fork = held[rref]
            assert row["forks"] == [{"fork": fork["fork"], "holder": holder}]
            first = f"RRef {rref} ({row['type']}), ready, owned by worker{owner}"
            assert row["cell"] and row["number"]
            maker = "notebook" if rref.startswith("0.") else f"worker{rref.partition('.')[0]}"
            made = f"made by cell [{row['number']}] on {maker}"
            lines = [first, f"{fork['fork']} at notebook: confirmed by the owner", made]
            words[rref] = ["\n".join(lines), "" if row["size"] is None else str(row["size"])]
    return words


@pytest.mark.parametrize("lab", ["jupyterlab", pytest.param("notebook", marks=pytest.mark.long)], indirect=True)
def test_panels_move_while_a_cell_trains_and_agree_with_the_runtime_at_rest(show, tmp_path):
    lesson = nbformat.read(LESSON, 4)
    lesson.cells = [cell for cell in lesson.cells if not any(":" in tag for tag in cell.metadata.get("tags", ()))]
    seen = tmp_path / "seen"
    (train,) = [cell for cell in lesson.cells if TRAIN in cell.source]
    train.source += TRAIN_ON.format(str(seen))
    notebook = show(lesson, LESSON.name)  # without exercises
    page = notebook.page
    kernel = psutil.Process(notebook.value("__import__('os').getpid()"))
    page.evaluate(WATCH, notebook.index(TRAIN))

    notebook.run_above(STOP)
    page.wait_for_function(MOVED, arg=CHANGES, polling=50)
    seen.touch()
    notebook.ended(HAND)
    assert notebook.errors() == []

    tables = notebook.value(TABLES, after=ASK)
    assert [own["contexts"] for own in tables.values()] == [{}, {}, {}]
    settles(page, lambda: page.locator(".rb-autograd .rb-card.rb-gone").count(), 1)  # the last one, with its numbers
    assert page.locator(".rb-autograd .rb-flight").count() == 0

    kept = ["Sequential", "StageWorker", "LocalOptimizer"]
    types = [row["type"] for own in tables.values() for row in own["owned"].values()]
    assert sorted(types) == sorted([*kept, *kept, "Tensor"])
    settles(page, lambda: page.locator("[data-rref]").evaluate_all(TITLES), rref_words(tables))

    ops = [row for own in tables.values() for row in own.get("ops", {}).values()]
    last = max(row["step"] for row in ops if row["op"] == "B")  # the evaluation after it is not shown
    blocks = page.locator(".rb-pipeline .rb-picture .rb-op:not(.rb-pale)")
    settles(page, blocks.count, sum(row["step"] == last for row in ops))
    settles(page, lambda: first_number(page, "pipeline"), f"step {last}")

    workers = set(notebook.value("[cluster.pid(worker) for worker in cluster.workers]"))
    born = kernel.children(recursive=True)
    assert len(workers & {process.pid for process in born}) == 2
    notebook.run_to_end(STOP)
    _, alive = psutil.wait_procs([process for process in born if process.pid in workers], SECONDS)
    assert alive == []  # what makes workers stays for the next cluster
    assert kernel.is_running()


def test_the_stop_button_ends_a_remote_loop_and_the_worker_is_usable(show):
    sources = [
        "%load_ext rpcbench\n%cluster start 1",
        "%%remote worker1\nprint('it loops')\nwhile True:\n    pass",
        "%%remote worker1\nprint('it is', 'usable')",
    ]
    notebook = show(sources, "loop.ipynb")
    notebook.run_to_end("%cluster start")
    notebook.run("while True")
    notebook.output("while True").filter(has_text="it loops").wait_for()
    notebook.page.locator("[data-command='notebook:interrupt-kernel']").click()
    notebook.ended("while True")
    notebook.output("while True").filter(has_text="KeyboardInterrupt").wait_for()
    notebook.run("usable")
    notebook.output("usable").filter(has_text="it is usable").wait_for()
    assert len(notebook.errors()) == 1


@pytest.mark.long
def test_each_worker_has_a_tab_that_fills_while_the_cell_runs(show, tmp_path):
    go = tmp_path / "go"
    sources = [
        "%load_ext rpcbench\n%cluster start 2",
        "%%remote all --tabs\nimport pathlib, time\nprint('begun')\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.02)\n'through'",
    ]
    notebook = show(sources, "tabs.ipynb")
    notebook.run_to_end("%cluster start")
    notebook.output("%cluster start").filter(has_text="2 of 2 workers ready").wait_for()
    notebook.run("--tabs")
    output = notebook.cell("--tabs").locator(".jp-OutputArea").first
    for name in ("worker1", "worker2"):
        output.get_by_role("tab", name=name).click()
        output.get_by_text("begun").filter(visible=True).wait_for()
    go.touch()
    notebook.ended("--tabs")
    for name in ("worker1", "worker2"):
        output.get_by_role("tab", name=name).click()
        output.get_by_text("'through'").filter(visible=True).wait_for()
    assert notebook.errors() == []
