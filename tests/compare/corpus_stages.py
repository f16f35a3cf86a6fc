"""Layers on other ranks: pipelines by hand, and experts to which rows travel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from corpus_tensor import ColumnLinearAlone
from parts import (
    LABELS,
    WIDTH,
    Exchange,
    Feed,
    Lm,
    average_gradients,
    cut_feeds,
    loss_of,
    rows_of,
    seeded,
    share,
    step_lm,
    words_of,
)
from program import REDUCE, TIMES, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

PARTS = 2  # micro-batches


# -- two stages: words and the first block, the second block and the scores
def two_blocks() -> Lm:
    return Lm(blocks=2)


def tied_blocks() -> Lm:
    model = two_blocks()
    model.head.weight = model.embed.weight
    return model


def make_two() -> nn.Module:
    return seeded(two_blocks)


def make_tied() -> nn.Module:
    return seeded(tied_blocks)


class FirstStage(nn.Module):
    def __init__(self, whole: Lm) -> None:
        super().__init__()
        self.embed, self.positions = whole.embed, whole.positions
        self.blocks = nn.ModuleDict({"0": whole.blocks[0]})

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks["0"](self.embed(x) + self.positions(torch.arange(x.shape[1])))


class LastStage(nn.Module):
    def __init__(self, whole: Lm) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": whole.blocks[1]})
        self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks["1"](x)))


def stage_of(whole: Lm, mesh: DeviceMesh) -> nn.Module:
    return LastStage(whole) if mesh["pp"].get_local_rank() else FirstStage(whole)


def stage(mesh: DeviceMesh) -> nn.Module:
    return stage_of(make_two(), mesh)


def tied_stage(mesh: DeviceMesh) -> nn.Module:
    return stage_of(make_tied(), mesh)


def backward_of_parts(model: nn.Module, mesh: DeviceMesh, divided: bool = True) -> Tensor:
    """Forward with all micro-batches, then backward. The loss is on the last stage, elsewhere 0."""
    group, loss = mesh.get_group("pp"), torch.zeros(())
    results, batch = [], words_of()
    if "dp" in (mesh.mesh_dim_names or ()):
        batch = share(batch[0], mesh["dp"]), share(batch[1], mesh["dp"])
    for x, y in zip(*(each.chunk(PARTS) for each in batch), strict=True):
        if mesh["pp"].get_local_rank() == 0:
            result = model(x)
            dist.send(result.detach(), group=group, group_dst=1)
            results.append((x, result))
        else:
            came = torch.empty(*x.shape, WIDTH)
            dist.recv(came, group=group, group_src=0)
            part = loss_of(model(came.requires_grad_()), y)
            loss += part.detach() / PARTS
            results.append((came, part / PARTS if divided else part))
    for came, result in results:
        if mesh["pp"].get_local_rank() == 0:
            gradient = torch.empty_like(result)
            dist.recv(gradient, group=group, group_src=1)
            result.backward(gradient)
        else:
            result.backward()
            dist.send(came.grad, group=group, group_dst=0)
    return loss


def step_parts(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return backward_of_parts(model, mesh)


def step_parts_not_divided(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each micro-batch counts as a whole batch."""
    return backward_of_parts(model, mesh, divided=False)


def step_tied(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Both stages have a part of the gradient of the one weight."""
    loss = backward_of_parts(model, mesh)
    tied = model.head if mesh["pp"].get_local_rank() else model.embed
    dist.all_reduce(tied.weight.grad, group=mesh.get_group("pp"))
    return loss


# -- stages that are cut over `tp`, or copied over `dp`
def cut_stage(mesh: DeviceMesh) -> nn.Module:
    return stage_of(cut_feeds(make_two(), mesh.get_group("tp")), mesh)


def cut_stage_without_copy(mesh: DeviceMesh) -> nn.Module:
    """The gradient that the last stage sends back is a part of it."""
    model = cut_stage(mesh)
    if mesh["pp"].get_local_rank() == 1:
        model.blocks["1"].feed.up.__class__ = ColumnLinearAlone
    return model


def step_parts_of_rows(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_parts(model, mesh)
    average_gradients(model, mesh.get_group("dp"))
    return loss


def step_parts_of_rows_at_the_end(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The average is where the loss is known, so the first stage has none."""
    loss = backward_of_parts(model, mesh)
    if mesh["pp"].get_local_rank() == 1:
        average_gradients(model, mesh.get_group("dp"))
    return loss


# -- experts: each row goes to one
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleDict({str(number): Feed() for number in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        chance, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        answers = self.answers(x[order], chosen.bincount(minlength=4))
        return x + chance[:, None] * self.put_back(answers, order)

    def answers(self, x: Tensor, counts: Tensor) -> Tensor:
        """The answers to rows that are sorted by expert."""
        parts = x.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])

    def put_back(self, answers: Tensor, order: Tensor) -> Tensor:
        return torch.zeros_like(answers).index_copy(0, order, answers)


class ExpertsOnRanks(Experts):
    """One expert is here; rows travel to theirs and back."""

    def answers(self, x: Tensor, counts: Tensor) -> Tensor:
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        sent, received = counts.tolist(), coming.tolist()
        (expert,) = self.experts.values()
        return Exchange.apply(expert(Exchange.apply(x, sent, received, self.group)), received, sent, self.group)


class ExpertsInOtherOrder(ExpertsOnRanks):
    """Rows stay sorted by expert."""

    def put_back(self, answers: Tensor, order: Tensor) -> Tensor:
        return answers


class ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layer = Experts()
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.enter(x)))


def make_experts() -> nn.Module:
    return seeded(ExpertNet)


def step_experts(model: nn.Module) -> Tensor:
    x, y = rows_of(32)
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def experts_on(kind: type[ExpertsOnRanks], mesh: DeviceMesh) -> nn.Module:
    model, here = make_experts(), str(mesh.get_local_rank())
    model.layer.__class__, model.layer.group = kind, mesh.get_group("dp")
    model.layer.experts = nn.ModuleDict({here: model.layer.experts[here]})
    return model


def expert_of_rank(mesh: DeviceMesh) -> nn.Module:
    return experts_on(ExpertsOnRanks, mesh)


def expert_in_other_order(mesh: DeviceMesh) -> nn.Module:
    return experts_on(ExpertsInOtherOrder, mesh)


def backward_of_experts(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = (each.chunk(mesh.size())[mesh.get_local_rank()] for each in rows_of(32))
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def average_all_but_experts(model: nn.Module, mesh: DeviceMesh, expert_share: float) -> None:
    """The gradient of an expert is already the sum of what all ranks have sent back."""
    for name, each in model.named_parameters():
        if ".experts." in name:
            each.grad *= expert_share
        else:
            dist.all_reduce(each.grad, group=mesh.get_group("dp"))
            each.grad /= mesh.size()


def step_experts_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_experts(model, mesh)
    average_all_but_experts(model, mesh, 1 / mesh.size())
    return loss


def step_experts_not_divided(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_experts(model, mesh)
    average_all_but_experts(model, mesh, 1.0)
    return loss


def step_experts_averaged(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The loop takes all parameters, so each expert gets the mean of four experts' gradients."""
    loss = backward_of_experts(model, mesh)
    average_gradients(model, mesh.get_group("dp"))
    return loss


EXPERTS = tuple(name for name, _ in make_experts().named_parameters() if ".experts." in name)
FIRST_STAGE = tuple(n for n, _ in make_two().named_parameters() if n.startswith(("embed", "positions", "blocks.0")))
PP, DP4 = {"pp": 2}, {"dp": 4}
EXPERTS_ALONE, EXPERTS_RIGHT = (make_experts, step_experts), (expert_of_rank, step_experts_on_ranks)

PROGRAMS = [
    Program(
        "tied_weights_of_two_stages", (make_tied, step_lm), (tied_stage, step_tied), (tied_stage, step_parts), PP,
        "gradient", ("embed.weight", "embed", "head"), r"tied|shared|reduc|summand|add|\bsum|partial|stage",
    ),
    Program(
        "pipeline_loss_not_divided", (make_two, step_lm), (stage, step_parts), (stage, step_parts_not_divided), PP,
        "gradient", tuple(name for name, _ in make_two().named_parameters()), TIMES,
    ),
    Program(
        "pipeline_of_cut_stages_without_copy", (make_two, step_lm), (cut_stage, step_parts),
        (cut_stage_without_copy, step_parts), {"pp": 2, "tp": 2}, "backward",
        ("blocks.1.feed.norm", "blocks.1.feed.up", "blocks.1.feed", "blocks.1.attention", "blocks.1.attention.out"),
        REDUCE,
    ),
    Program(
        "first_stage_not_reduced", (make_two, step_lm), (stage, step_parts_of_rows),
        (stage, step_parts_of_rows_at_the_end), {"dp": 2, "pp": 2}, "gradient", FIRST_STAGE, REDUCE,
    ),
    Program(
        "expert_rows_in_other_order", EXPERTS_ALONE, EXPERTS_RIGHT, (expert_in_other_order, step_experts_on_ranks),
        DP4, "forward", ("layer",), r"order|permut|rows|token",
    ),
    Program(
        "expert_gradients_not_divided", EXPERTS_ALONE, EXPERTS_RIGHT, (expert_of_rank, step_experts_not_divided), DP4,
        "gradient", EXPERTS, TIMES,
    ),
    Program(
        "expert_gradients_averaged", EXPERTS_ALONE, EXPERTS_RIGHT, (expert_of_rank, step_experts_averaged), DP4,
        "gradient", EXPERTS, r"equal|same|averag|\bmean|reduc|group|none of the ways|fit",
    ),
]  # fmt: skip
