"""Record lessons for the site: `python docs/make_records.py [NAME ...]`, by default all of docs/records.

A record is made by the lesson's own cells, which run up to it as they stand; exercises are left out. What is over
so quickly that no frame would show it is slowed down by a cell of our own, and the site says so below the record. A
record keeps digests of its cells: when a lesson has changed the tests say so, and this script makes its record anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from rpcbench.panels import PANELS, MessagesPanel, Panel
from rpcbench.telemetry.recording import TABLES, Frame, Player, Record, flatten_world, load_record
from rpcbench.telemetry.views import diff_views

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "records"
LARGEST = 150_000  # bytes of a record


@dataclass(frozen=True)
class Scene:
    """A part of a lesson, from one cell to another, and the panel that shows its idea."""

    lesson: str
    panel: str
    cells: dict[str, str]
    """The first cell, the last one, and those between that get a frame with a name: their ids, and the names."""
    shows: str
    slowed: str = ""
    """A cell of ours, run before, which slows down what would be over between two frames."""
    apart: float = 0.0
    """Seconds between two frames without names, at least."""
    height: int = 480
    """Pixels of the player."""


LATE = "%chaos delay=400ms seed=1"
SCENES = {
    "rrefs": Scene(
        "10_rref_lifecycle", "rrefs",
        {
            "rref-03": "worker1 makes the value",
            "rref-09": "worker2 has a reference, too",
            "rref-13": "the notebook drops its own",
            "rref-15": "worker2 drops its own",
            "rref-18": "the meter keeps three",
        },
        "A reference is made, shared and dropped; then the meter keeps three. Each message took up to 0.4 s.",
        LATE, height=440,
    ),
    "autograd": Scene(
        "11_distributed_autograd_by_hand", "autograd",
        {"autograd-23": "a context", "autograd-24": "forward", "autograd-31": "backward"},
        "One context, from its first call to the end of its backward. Each message took up to 0.4 s.",
        LATE, height=440,
    ),
    "ring": Scene(
        "20_ring_all_reduce", "messages",
        {"ring-25": "both sums"},
        "The six steps of the ring on four ranks, then torch's all-reduce. Each rank waited 0.4 s before it sent.",
        """%%remote all
import time


def slowed(shift):
    def slow_shift(tensor):
        time.sleep(0.4)
        return shift(tensor)

    return slow_shift


shift = slowed(shift)""",
        height=600,
    ),
    "shards": Scene(
        "22_zero_and_fsdp", "shards",
        {"l22-36": "both steps"},
        "A step of FSDP that frees a layer after its forward, then one that keeps it. Each layer waited 0.25 s.",
        """%%remote all
import time

import rpcbench


def slowed(train):
    def slow_train(model, *rest, **more):
        rpcbench.watch_model(model)
        for layer in model:
            layer.register_forward_pre_hook(lambda *_: time.sleep(0.25))
            layer.register_forward_hook(lambda *ends: ends[-1].register_hook(lambda _: time.sleep(0.25)) and None)
        return train(model, *rest, **more)

    return slow_train


train = slowed(train)""",
        apart=0.4, height=600,
    ),
    "compare": Scene(
        "36_right_or_wrong", "compare",
        {
            "right-10": "right",
            "right-17": "no addition in the forward",
            "right-24": "no copy in the backward",
        },
        "The reports of three programs on two ranks: a right one, and two that each lack a reduction.",
        """import time

compare = cluster.compare


def slow_compare(**programs):
    report = compare(**programs)
    time.sleep(0.5)
    return report


cluster.compare = slow_compare""",
        apart=0.1, height=780,
    ),
    "pipeline": Scene(
        "24_pipeline_gpipe_vs_1f1b", "pipeline",
        {"lesson24-24": "measured"},
        "Five steps of GPipe, then five of 1F1B, with two workers and four micro-batches.",
        apart=0.15,
    ),
}  # fmt: skip


def cells(scene: Scene) -> tuple[list[nbformat.NotebookNode], list[nbformat.NotebookNode]]:
    """The lesson's cells with code before a scene, without exercises, and those of the scene."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{scene.lesson}.ipynb", 4)
    coded = [cell for cell in notebook.cells if cell.cell_type == "code" and not _is_exercise(cell)]
    places = [place for place, cell in enumerate(coded) if cell.id in scene.cells]
    return coded[: places[0]], coded[places[0] : places[-1] + 1]


def _is_exercise(cell: nbformat.NotebookNode) -> bool:
    return any(tag.startswith(("exercise:", "check:")) for tag in cell.metadata.get("tags", ()))


def digests(scene: Scene) -> dict[str, str]:
    """A digest of each cell that a record depends on, by the cell's id."""
    return {cell.id: hashlib.sha256(cell.source.encode()).hexdigest()[:12] for part in cells(scene) for cell in part}


def program(scene: Scene, path: Path) -> list[str]:
    """The sources of the cells that make a record."""
    before, played = cells(scene)
    made = [*(cell.source for cell in before), scene.slowed, f"%record {path}"]
    for cell in played:
        made += [cell.source, f"%record mark {scene.cells[cell.id]}" if cell.id in scene.cells else ""]
    return [source for source in [*made, "%record stop", "%cluster stop"] if source]


def shortened(record: Record, kind: type[Panel], apart: float) -> Record:
    """The record as one panel plays it: without other messages, and frames that look like the one before."""
    tables = TABLES if kind is MessagesPanel else tuple(name for name in TABLES if name != "messages")
    player, before, seen = Player(record), {}, None
    frames: list[Frame] = []
    for at, (seconds, _, name) in enumerate(record.frames):
        player.go_to_frame(at)
        sections, view = flatten_world(player.world(), tables), kind.look(player.world())
        if name or (view != seen and seconds - frames[-1][0] >= apart):
            frames.append((round(seconds, 3), diff_views(before, sections), name))
            before, seen = sections, view
    return Record(record.about, tuple(frames))


def make(scene: Scene, path: Path) -> None:
    """Run a part of a lesson and write its record."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "record.json"
        coded = [nbformat.v4.new_code_cell(source) for source in program(scene, draft)]
        where = {"metadata": {"path": str(ROOT / "notebooks")}}
        NotebookClient(nbformat.v4.new_notebook(cells=coded), kernel_name="python3", resources=where).execute()
        record = shortened(load_record(draft), PANELS[scene.panel], scene.apart)
    whole = {**record.about, "made_from": digests(scene), "frames": record.frames}
    path.write_text(json.dumps(whole, separators=(",", ":")) + "\n")


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or SCENES:
        path = FOLDER / f"{name}.json"
        make(SCENES[name], path)
        sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
