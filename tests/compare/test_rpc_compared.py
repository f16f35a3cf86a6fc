"""RPC programs with distributed autograd, compared with one process: right ones, and wrong twins that are explained."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import rpcbench
import rpcbench.autograd as dist_autograd
from rpcbench import rpc
from rpcbench.nn import RemoteModule
from rpcbench.optim import DistributedOptimizer

pytestmark = pytest.mark.process


class Words(nn.Module):
    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.mix = nn.EmbeddingBag(10, 8), nn.Linear(8, 8)

    def forward(self, words):
        return torch.tanh(self.mix(self.table(words)))


class Scores(nn.Module):
    def __init__(self, seed=2):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.scores = Words(), Scores()
        torch.manual_seed(3)
        self.between = nn.Linear(8, 8)

    def forward(self, words):
        return self.scores(self.between(self.words(words)))


class Parts(nn.Module):
    """One part by an RRef, one by a RemoteModule, one here."""

    def __init__(self, seed=2):
        super().__init__()
        self.words_rref = rpc.remote("worker1", Words)
        self.scores = RemoteModule("worker2", Scores, (seed,))
        torch.manual_seed(3)
        self.between = nn.Linear(8, 8)

    def forward(self, words):
        return self.scores(self.between(self.call_words(words)))

    def call_words(self, words):
        return self.words_rref.rpc_sync().forward(words)

    def parameter_rrefs(self):
        words = rpc.rpc_sync("worker1", wrap_parameters, (self.words_rref,))
        return [*words, *self.scores.remote_parameters(), *map(rpc.RRef, self.between.parameters())]


class DetachedParts(Parts):
    def call_words(self, words):
        return super().call_words(words).detach()


class SkippedParts(Parts):
    def forward(self, words):
        return self.scores(self.call_words(words))


def wrap_parameters(rref):
    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]


def draw_batch():
    made = torch.Generator().manual_seed(5)
    return torch.randint(0, 10, (8, 4), generator=made), torch.randint(0, 3, (8,), generator=made)


def run_backward(model):
    words, labels = draw_batch()
    loss = functional.cross_entropy(model(words), labels)
    loss.backward()
    return loss


def step(model):
    if not hasattr(model, "optimizer"):
        model.optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    loss = run_backward(model)
    model.optimizer.step()
    model.zero_grad()
    return loss


def run_parts(model, parts=1, divided=True, steps=False):
    """Forward of all micro-batches, which may run at once, and one backward."""
    words, labels = draw_batch()
    with dist_autograd.context() as context:
        losses = [
            functional.cross_entropy(model(each), wanted) / (parts if divided else 1)
            for each, wanted in zip(words.chunk(parts), labels.chunk(parts), strict=True)
        ]
        loss = torch.stack(losses).sum()
        dist_autograd.backward(context, [loss])
        if steps:
            model.optimizer.step(context)
        return loss.detach()


def step_parts(model, choose=lambda rrefs: rrefs, **options):
    if not hasattr(model, "optimizer"):
        model.optimizer = DistributedOptimizer(torch.optim.Adagrad, choose(model.parameter_rrefs()), lr=0.1)
    return run_parts(model, steps=True, **options)


def step_microbatches(model):
    return step_parts(model, parts=4)


def add_up_microbatches(model):
    """A context for each micro-batch, and one for their sum."""
    words, labels = draw_batch()
    total = torch.zeros(())
    if not hasattr(model, "optimizer"):
        model.optimizer = DistributedOptimizer(torch.optim.Adagrad, model.parameter_rrefs(), lr=0.1)
    with dist_autograd.accumulator() as into:
        for each, wanted in zip(words.chunk(2), labels.chunk(2), strict=True):
            with dist_autograd.context() as context:
                loss = functional.cross_entropy(model(each), wanted) / 2
                dist_autograd.backward(context, [loss])
                dist_autograd.accumulate(into, context)
                total += loss.detach()
        model.optimizer.step(into)
    return total


@pytest.mark.parametrize("parallel_step", [step_parts, step_microbatches, add_up_microbatches])
def test_a_right_program_is_right(four, parallel_step):
    report = four.compare(reference=(Whole, step), parallel=(Parts, parallel_step), steps=2, driver=True)
    report.raise_if_wrong()
    right = {(each.key.phase, each.key.name) for each in report.verdicts if each.word == "right" and each.key.turn}
    assert {("forward", "words"), ("forward", "scores.layers.0"), ("forward", "between"), ("forward", "")} <= right
    assert {("backward", "words.mix"), ("backward", "scores"), ("gradient", "between.weight"), ("loss", "")} <= right
    assert {("gradient", "words.table.weight"), ("step", "scores.layers.2.bias"), ("step", "between.bias")} <= right


def test_gradients_without_an_optimizer_are_kept_before_their_context_ends(four):
    report = four.compare(reference=(Whole, run_backward), parallel=(Parts, run_parts), driver=True)
    report.raise_if_wrong()
    right = {each.key.name for each in report.verdicts if each.word == "right" and each.key.phase == "gradient"}
    assert right == {name for name, _ in Whole().named_parameters()}


class Server(nn.Module):
    """A model on one worker that has a part on another one."""

    def __init__(self):
        super().__init__()
        self.words, self.scores = Words(), rpc.remote("worker2", Scores)
        torch.manual_seed(3)
        self.between = nn.Linear(8, 8)

    def forward(self, words):
        return self.scores.rpc_sync().forward(self.between(self.words(words)))


class Trainer:
    """No module."""

    def __init__(self):
        self.model = rpc.remote("worker1", Server)

    def __call__(self, words):
        return self.model.rpc_sync().forward(words)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Whole()

    def forward(self, words):
        return self.model(words)


@pytest.mark.parametrize(
    ("make", "make_parts"), [(Whole, lambda: rpc.remote("worker1", Server)), (Wrapped, Trainer)], ids=["rref", "object"]
)
def test_parts_are_found_on_workers_whose_parts_are_on_others(four, make, make_parts):
    def run(model):
        return run_parts(model if isinstance(model, Trainer) else model.rpc_sync().forward)

    report = four.compare(reference=(make, run_backward), parallel=(make_parts, run), driver=True)
    report.raise_if_wrong()
    right = {(each.key.phase, each.key.name) for each in report.verdicts if each.word == "right"}
    path = "model." if make is Wrapped else ""
    assert {("forward", path.rstrip(".")), ("forward", f"{path}scores"), ("backward", f"{path}between")} <= right
    assert {("gradient", f"{path}words.mix.bias"), ("gradient", f"{path}scores.layers.2.weight")} <= right


class ListOfLayers(nn.Module):
    """Parts in a list of RRefs."""

    def __init__(self):
        super().__init__()
        self.layers = [rpc.remote(f"worker{n + 1}", make_layer, (n,)) for n in range(3)]


def make_layer(number):
    torch.manual_seed(number)
    return nn.Linear(6, 6)


def make_layers():
    model = nn.Module()
    model.layers = nn.ModuleList(make_layer(n) for n in range(3))
    return model


def draw_rows():
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(5))


def step_layers(model):
    x = draw_rows()
    for layer in model.layers:
        x = layer(x).relu()
    loss = x.square().mean()
    loss.backward()
    return loss


def call_layer(layer, x):
    return layer.local_value()(x.to_here() if isinstance(x, rpc.RRef) else x).relu()


def step_rows_at_once(model):
    with dist_autograd.context() as context:
        results = []
        for x in draw_rows().chunk(8):
            for layer in model.layers[:-1]:
                x = rpc.remote(layer.owner(), call_layer, (layer, x))
            results.append(rpc.rpc_async(model.layers[-1].owner(), call_layer, (model.layers[-1], x)))
        loss = torch.cat([each.wait() for each in results]).square().mean()
        dist_autograd.backward(context, [loss])
        return loss


def test_calls_that_run_at_once_are_in_the_order_in_which_they_were_sent(four):
    for _ in range(3):
        programs = {"reference": (make_layers, step_layers), "parallel": (ListOfLayers, step_rows_at_once)}
        report = four.compare(**programs, driver=True)
        report.raise_if_wrong()
        assert {each.word for each in report.verdicts if each.key.name == "layers.1"} == {"right"}


def leave_out_a_part(rrefs):
    return [rref for rref in rrefs if rref.owner_name() != "worker2"]


WRONG = {
    "detached": (DetachedParts, step_parts, "gradient", "words.table.weight", "no rank has a gradient"),
    "left out": (
        Parts, lambda model: step_parts(model, leave_out_a_part), "step", "scores.layers.0.weight",
        "has not moved in the step, on rank 1",
    ),
    "own seed": (lambda: Parts(7), step_parts, "initial", "scores.layers.0.weight", "with the same seed"),
    "not divided": (Parts, lambda model: step_parts(model, parts=4, divided=False), "loss", "", "4 times too large"),
    "skipped": (SkippedParts, step_parts, "forward", "scores.layers.0", "the fault lies between them"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_explained(four, name):
    make_parts, wrong_step, phase, place, cause = WRONG[name]
    first = four.compare(reference=(Whole, step), parallel=(make_parts, wrong_step), driver=True).first
    assert (first.phase, first.name) == (phase, place), first
    assert cause in first.cause and first.ranks and first.error > first.allowed


def count_hooks(rref):
    modules = list(rref.local_value().modules())
    own = sum("forward" in vars(each) for each in modules)
    return len(modules), own + sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules)


def test_the_error_of_a_worker_is_raised_and_nothing_is_left_on_the_parts(four):
    made = []

    def make():
        made.append(Parts())
        return made[0]

    def fail(model):
        with dist_autograd.context():
            return model(torch.full((2, 2), 99))

    with pytest.raises(RuntimeError, match="value 99"):
        four.compare(reference=(Whole, step), parallel=(make, fail), driver=True)
    for rref in (made[0].words_rref, made[0].scores.get_module_rref()):
        count, hooks = four.rpc_sync(rref.owner_name(), count_hooks, (rref,))
        assert count > 1 and hooks == 0
    assert not any(each._forward_hooks for each in (made[0], made[0].between))
    with torch.no_grad():
        torch.testing.assert_close(made[0](draw_batch()[0]), Whole()(draw_batch()[0]))


def test_ranks_that_make_such_a_model_are_told_to_use_the_driver(four):
    with pytest.raises(rpcbench.CompareError, match=r"with a part on worker\d: a program that the notebook drives"):
        four.compare(reference=(Whole, step), parallel=(lambda: Parts(), step_parts), workers="worker1,worker2")
