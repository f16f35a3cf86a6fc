"""Pipelines of `torch.distributed.pipelining`: one stage on a rank or two, named as in the model, or from 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from corpus_stages import make_two, two_blocks
from corpus_tensor import ColumnLinearAlone
from parts import Feed, Lm, cut_feeds, loss_of, rows_of, seeded, step_lm, words_of
from program import REDUCE, TIMES, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

PARTS = 4  # micro-batches
LAYERS = 4
ONE_STAGE = (ScheduleGPipe, Schedule1F1B)


# -- a model with parts deleted: the names of the whole one
class LmPart(Lm):
    """What is left of a model; other stages have the rest."""

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def keep_part(whole: Lm, number: int) -> nn.Module:
    """Keep stage 0 or 1 of two."""
    whole.__class__ = LmPart
    whole.blocks = nn.ModuleDict({str(number): whole.blocks[number]})
    for name in ("norm", "head") if number == 0 else ("embed", "positions"):
        setattr(whole, name, None)
    return whole


def schedule_stages(
    model: nn.Module, stages: dict[int, nn.Module], mesh: DeviceMesh, count: int, schedule: Callable[..., Any],
    **options: Any,
) -> nn.Module:  # fmt: skip
    """The model with a schedule of its stages, by number, as an attribute."""
    made = [
        PipelineStage(stage, number, count, torch.device("cpu"), group=mesh.get_group("pp"))
        for number, stage in stages.items()
    ]
    model.schedule = schedule(made[0] if schedule in ONE_STAGE else made, PARTS, loss_fn=loss_of, **options)
    model.has_first, model.has_last = 0 in stages, count - 1 in stages
    return model


def run_schedule(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor | None:
    """The loss, on the rank of the last stage."""
    losses: list[Tensor] = []
    inputs, target = batch[:1] if model.has_first else (), batch[1] if model.has_last else None
    model.schedule.step(*inputs, target=target, losses=losses)
    return torch.stack(losses).mean().detach() if losses else None


def part_of(mesh: DeviceMesh, schedule: Callable[..., Any], seed: int = 17, **options: Any) -> nn.Module:
    rank = mesh["pp"].get_local_rank()
    model = keep_part(seeded(two_blocks, seed), rank)
    return schedule_stages(model, {rank: model}, mesh, 2, schedule, **options)


def part_in_gpipe(mesh: DeviceMesh) -> nn.Module:
    return part_of(mesh, ScheduleGPipe)


def part_seeded_by_rank(mesh: DeviceMesh) -> nn.Module:
    return part_of(mesh, ScheduleGPipe, 17 + mesh["pp"].get_local_rank())


def part_in_1f1b(mesh: DeviceMesh) -> nn.Module:
    return part_of(mesh, Schedule1F1B)


def part_not_scaled(mesh: DeviceMesh) -> nn.Module:
    """The loss is a mean, and its gradients are not divided by the number of micro-batches."""
    return part_of(mesh, Schedule1F1B, scale_grads=False)


def step_words(model: nn.Module, mesh: DeviceMesh) -> Tensor | None:
    return run_schedule(model, words_of())


def step_words_for_others(model: nn.Module, mesh: DeviceMesh) -> Tensor | None:
    """The targets of two micro-batches have changed places."""
    x, y = words_of()
    return run_schedule(model, (x, y[[1, 0, 2, 3]]))


# -- some of the layers, numbered from 0
class Deep(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Feed() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_deep() -> Deep:
    return seeded(Deep)


def make_row(seed: int = 17) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(*(Feed() for _ in range(LAYERS))), seed)


def traced_stage(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Torch has split the model, and each stage has its names."""
    pipe = pipeline(make_deep(), (rows_of(2)[0],), split_spec={"layers.2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(mesh["pp"].get_local_rank(), torch.device("cpu"), mesh.get_group("pp"))
    stage.submod.schedule = ScheduleGPipe(stage, PARTS, loss_fn=loss_of, **options)
    stage.submod.has_first, stage.submod.has_last = stage.is_first, stage.is_last
    return stage.submod


def traced_not_scaled(mesh: DeviceMesh) -> nn.Module:
    return traced_stage(mesh, scale_grads=False)


def half_of_layers(mesh: DeviceMesh, layers: Any, schedule: Callable[..., Any], **options: Any) -> nn.Module:
    rank, half = mesh["pp"].get_local_rank(), LAYERS // 2
    model = nn.Sequential(*list(layers)[rank * half : (rank + 1) * half])
    return schedule_stages(model, {rank: model}, mesh, 2, schedule, **options)


def half_of_deep(mesh: DeviceMesh) -> nn.Module:
    return half_of_layers(mesh, make_deep().layers, Schedule1F1B)


def half_of_cut(mesh: DeviceMesh) -> nn.Module:
    return half_of_layers(mesh, cut_feeds(make_deep(), mesh.get_group("tp")).layers, Schedule1F1B)


def half_of_cut_without_copy(mesh: DeviceMesh) -> nn.Module:
    """The gradient that the last stage sends back is a part of it."""
    model = half_of_cut(mesh)
    if mesh["pp"].get_local_rank() == 1:
        model[0].up.__class__ = ColumnLinearAlone
    return model


def half_of_row(mesh: DeviceMesh) -> nn.Module:
    return half_of_layers(mesh, make_row(), ScheduleGPipe)


def half_of_row_seeded_by_rank(mesh: DeviceMesh) -> nn.Module:
    return half_of_layers(mesh, make_row(17 + mesh["pp"].get_local_rank()), ScheduleGPipe)


def layers_of(mesh: DeviceMesh, numbers: tuple[int, int], schedule: Callable[..., Any], **options: Any) -> nn.Module:
    """Two stages of one layer."""
    layers = make_deep().layers
    stages = {number: nn.Sequential(layers[number]) for number in numbers}
    return schedule_stages(nn.ModuleList(stages.values()), stages, mesh, LAYERS, schedule, **options)


def layers_in_loops(mesh: DeviceMesh, **options: Any) -> nn.Module:
    rank = mesh["pp"].get_local_rank()
    return layers_of(mesh, (rank, rank + 2), ScheduleInterleaved1F1B, **options)


def layers_not_scaled(mesh: DeviceMesh) -> nn.Module:
    return layers_in_loops(mesh, scale_grads=False)


def layers_to_and_fro(mesh: DeviceMesh) -> nn.Module:
    rank = mesh["pp"].get_local_rank()
    return layers_of(mesh, (rank, LAYERS - 1 - rank), ScheduleZBVZeroBubble)


def step_rows_alone(model: nn.Module) -> Tensor:
    x, y = rows_of()
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_rows(model: nn.Module, mesh: DeviceMesh) -> Tensor | None:
    return run_schedule(model, rows_of())


def step_rows_for_others(model: nn.Module, mesh: DeviceMesh) -> Tensor | None:
    """The targets of two micro-batches have changed places."""
    x, y = rows_of()
    return run_schedule(model, (x, y[[2, 3, 0, 1, 4, 5, 6, 7]]))


PP = {"pp": 2}
WORDS, DEEP, ROW = (make_two, step_lm), (make_deep, step_rows_alone), (make_row, step_rows_alone)
OF_TWO, OF_DEEP = (tuple(name for name, _ in make().named_parameters()) for make in (make_two, make_deep))

PROGRAMS = [
    Program(
        "gpipe_targets_in_other_order", WORDS, (part_in_gpipe, step_words), (part_in_gpipe, step_words_for_others), PP,
        "loss", ("",), "targets",
    ),
    Program(
        "gpipe_stage_seeded_by_rank", WORDS, (part_in_gpipe, step_words), (part_seeded_by_rank, step_words), PP,
        "initial", tuple(name for name in OF_TWO if name.startswith(("blocks.1", "norm", "head"))), r"\bseed",
    ),
    Program(
        "one_f_one_b_not_scaled", WORDS, (part_in_1f1b, step_words), (part_not_scaled, step_words), PP, "gradient",
        OF_TWO, TIMES,
    ),
    Program(
        "traced_pipeline_not_scaled", DEEP, (traced_stage, step_rows), (traced_not_scaled, step_rows), PP, "gradient",
        OF_DEEP, TIMES,
    ),
    Program(
        "row_of_layers_seeded_by_rank", ROW, (half_of_row, step_rows), (half_of_row_seeded_by_rank, step_rows), PP,
        "initial", tuple(name for name, _ in make_row().named_parameters() if name.startswith(("2", "3"))), r"\bseed",
    ),
    Program(
        "one_f_one_b_of_cut_layers_without_copy", DEEP, (half_of_cut, step_rows),
        (half_of_cut_without_copy, step_rows), {"pp": 2, "tp": 2}, "backward",
        ("layers.2.norm", "layers.2.up", "layers.2", "layers.1"), REDUCE,
    ),
    Program(
        "interleaved_1f1b_not_scaled", DEEP, (layers_in_loops, step_rows), (layers_not_scaled, step_rows), PP,
        "gradient", OF_DEEP, TIMES,
    ),
    Program(
        "zero_bubble_targets_in_other_order", DEEP, (layers_to_and_fro, step_rows),
        (layers_to_and_fro, step_rows_for_others), PP, "loss", ("",), "targets",
    ),
]  # fmt: skip
