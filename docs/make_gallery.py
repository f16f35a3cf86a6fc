"""Make the gallery of silent bugs: `python docs/make_gallery.py [NAME ...]`.

The programs of the kinds with these names, and those that have changed since their record, are compared with one
process and trained, right and wrong. Then all pages and pictures are written, by `gallery_pages`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gallery_pages import FOLDER, about_of, digest, files, names_on_ranks, program_text, record_path
from silent_bugs import KINDS, Kind
from torch.distributed.device_mesh import init_device_mesh

import rpcbench
from rpcbench.base.ids import Table
from rpcbench.compare.report_rows import report_tables
from rpcbench.telemetry.recording import FORMAT, VERSION, Frame, flatten_world
from rpcbench.telemetry.views import View, diff_views

STEPS = 60
APART = 0.2  # seconds between two frames
HELD = 6  # frames that show the report of the right program
LARGEST = 60_000  # bytes of a record


# -- programs
def functions(kind: Kind, right: bool) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The program in one process, and that on ranks, as `cluster.compare` takes them."""
    module = ModuleType("program")  # in no table of modules, so that workers get its functions by value
    exec(compile(program_text(kind, right), f"{kind.name}.py", "exec"), vars(module))
    make, step = names_on_ranks(kind)
    return (module.make_model, module.step), (getattr(module, make), getattr(module, step))


def compare(cluster: rpcbench.Cluster, kind: Kind, right: bool = False) -> rpcbench.CompareReport:
    """Compare the program of a kind, or its right twin, with one process."""
    reference, parallel = functions(kind, right)
    return cluster.compare(reference=reference, parallel=parallel, mesh=kind.mesh, workers=_workers(cluster, kind))


def _workers(cluster: rpcbench.Cluster, kind: Kind) -> list[str]:
    return list(cluster.workers[: math.prod(kind.mesh.values())])


def train(cluster: rpcbench.Cluster, kind: Kind, right: bool = False) -> list[float]:
    """The losses of a training: in a pipeline those of the last stage, else the mean over the ranks."""
    curves = cluster.spmd(train_rank, functions(kind, right)[1], kind, workers=_workers(cluster, kind))
    if "pp" in kind.mesh:
        curves = curves[-1:]
    return [float(f"{sum(losses) / len(losses):.4g}") for losses in zip(*curves, strict=True)]


def train_rank(program: tuple[Callable[..., Any], Callable[..., Any]], kind: Kind) -> list[float]:
    """Train on this rank, and return what the steps return."""
    mesh = init_device_mesh("cpu", tuple(kind.mesh.values()), mesh_dim_names=tuple(kind.mesh))
    make, step = program
    model = make(mesh)
    name, rate = kind.optimizer or ("SGD", 0.0)  # a program with an optimizer of its own keeps its parameters
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=rate)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step(model, mesh) if step.__code__.co_argcount > 1 else step(model)))
        optimizer.step()
    return losses


# -- records
def measure(cluster: rpcbench.Cluster, kind: Kind) -> None:
    """Compare and train the two programs of a kind, and write the record."""
    right, wrong = compare(cluster, kind, right=True), compare(cluster, kind)
    right.raise_if_wrong()
    frames = record_reports(right, wrong)
    about = {
        "format": FORMAT, "version": VERSION, "holds": {"members": 1, "frames": len(frames)},
        "leaves_out": ["values of tensors"], "made_from": digest(kind), "report": str(wrong),
        "losses": {"right": train(cluster, kind, right=True), "wrong": train(cluster, kind)},
    }  # fmt: skip
    path = record_path(kind)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**about, "frames": frames}, separators=(",", ":"), ensure_ascii=False) + "\n")
    sys.stdout.write(f"{kind.name}: {path.stat().st_size} bytes; {wrong.first}\n")


def record_reports(right: rpcbench.CompareReport, wrong: rpcbench.CompareReport) -> list[Frame]:
    """Frames with the one report, then with the other, whose values come in the order in which they were judged."""
    worlds = [("right", _world_of(right, None)), *[("", _world_of(right, None))] * (HELD - 1)]
    worlds += [("", _world_of(wrong, count)) for count in range(1, len(report_tables(wrong)["verdicts"]))]
    worlds.append(("wrong", _world_of(wrong, None)))
    frames: list[Frame] = []
    before: View = {}
    for n, (name, view) in enumerate(worlds):
        frames.append((round(n * APART, 1), diff_views(before, view), name))
        before = view
    return frames


def _world_of(report: rpcbench.CompareReport, count: int | None) -> View:
    """The world after a comparison, or when it had judged some values."""
    tables: dict[str, Table] = _shorten_numbers(report_tables(report))
    if count is not None:
        shown = sorted(tables["verdicts"].items(), key=lambda item: item[1]["order"])[:count]
        tables["verdicts"] = dict(shown)
        words = "The wrong program, value by value"
        tables["comparisons"]["0"] |= {"words": words, "first": "", "ranks": [], "values": count}
    member = {"name": "notebook", "id": 0, "incarnation": 0, "state": "up", "left_out": 0}
    return flatten_world({0: {**member, "tables": tables}})


def _shorten_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shorten_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shorten_numbers(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main(names: list[str]) -> None:
    old = [
        kind
        for kind in KINDS
        if kind.name in names or not record_path(kind).exists() or about_of(kind)["made_from"] != digest(kind)
    ]
    if old:
        with rpcbench.Cluster(4) as cluster:
            for kind in old:
                measure(cluster, kind)
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    sys.stdout.write(f"{Path(FOLDER).name}: {len(KINDS)} kinds\n")


if __name__ == "__main__":
    main(sys.argv[1:])
