"""Models, losses and loops of users: their settings are respected, and errors name the operation."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline import Pipeline, lazy, schedule, split, traced
from rpcbench.pipeline.stage import TrainModes, changes_in_place
from rpcbench.runtime.agent import Agent

ROW = ["worker1", "worker2"]
SGD = (torch.optim.SGD, {"lr": 0.5})
HALVED = (torch.optim.lr_scheduler.StepLR, {"step_size": 1, "gamma": 0.5})
PLAN = schedule("0F0 0F1 0B0 0B1 0F2 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")


@pytest.fixture(autouse=True)
def collected(agents: list[Agent]) -> Iterator[None]:
    """Collect garbage after a test: the frames of a caught error hold its pipeline."""
    yield
    gc.collect()


def chain(*inner: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), *inner, nn.Linear(8, 2)).double()


def batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4, dtype=torch.double), torch.randn(samples, 2, dtype=torch.double)


def pipeline(model: nn.Sequential | None = None, **more: Any) -> Pipeline:
    """A pipeline of the model, cut after its first layer."""
    model = chain(nn.Tanh()) if model is None else model
    torch.manual_seed(2)
    options = {"microbatches": 3, "loss_fn": functional.mse_loss, "optimizer": SGD, **more}
    return Pipeline(split(model, ROW, balance=[1, len(model) - 1]), **options)


def gradients_alone(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    functional.mse_loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- loops
def test_a_checkpoint_includes_scheduler_steps_that_follow_its_optimizer_step(tmp_path: Path) -> None:
    more = {"lr_scheduler": HALVED, "checkpoint": tmp_path, "checkpoint_every": 2}
    pipe, again = pipeline(**more), pipeline(**more)
    rates = []
    for _ in range(3):
        pipe.step(*batch())
        pipe.lr_scheduler.step()
        if pipe.optimizer_step >= 2:
            assert again.resume() == 2
            rates.append(again.lr)
    assert rates == [0.125, 0.125], "the rate after optimizer step 2, also when step 3 has changed it"
    again.lr_scheduler.step()
    assert pipeline(**more).resume() == 2 and again.lr == 0.0625
    last = pipeline(**more)
    last.resume()
    assert last.lr == 0.125, "a pipeline that has only loaded the checkpoint does not write to it"


def test_a_pipeline_that_loads_another_checkpoint_does_not_change_its_own(tmp_path: Path) -> None:
    more = {"lr_scheduler": HALVED, "checkpoint": tmp_path / "own", "checkpoint_every": 1}
    pipe, again = pipeline(**more), pipeline(**more)
    pipe.step(*batch())
    pipe.save(tmp_path / "other")
    assert pipe.load(tmp_path / "other") == 1
    pipe.lr_scheduler.step()
    assert pipe.lr == 0.25 and again.resume() == 1 and again.lr == 0.5


@pytest.mark.parametrize("lr_step", ["step", "epoch"])
def test_a_resumed_fit_has_the_losses_of_an_undisturbed_one(tmp_path: Path, lr_step: str) -> None:
    data = [batch(), batch(), batch()]
    whole = pipeline(lr_scheduler=HALVED).fit(data, epochs=4, lr_step=lr_step, progress=False)
    more = {"lr_scheduler": HALVED, "checkpoint": tmp_path, "checkpoint_every": 1}
    pipeline(**more).fit(data, epochs=2, lr_step=lr_step, progress=False)
    resumed = pipeline(**more)
    assert resumed.resume() == 6
    assert resumed.fit(data, epochs=2, lr_step=lr_step, progress=False).losses == whole.losses[6:]
    assert resumed.lr == 0.5 * 0.5 ** {"step": 12, "epoch": 4}[lr_step]


def test_a_plateau_scheduler_gets_the_loss_of_the_step_the_epoch_or_the_validation() -> None:
    plateau = (torch.optim.lr_scheduler.ReduceLROnPlateau, {"patience": 0, "threshold": 1e9, "factor": 0.5})
    pipe, data, others = pipeline(lr_scheduler=plateau), [batch(), batch()], [batch()]
    pipe.fit(data, epochs=2, progress=False)
    assert pipe.lr == 0.125, "no epoch was better by the threshold"
    judged: list[Any] = []
    pipe.lr_scheduler.step = judged.append  # type: ignore[method-assign]
    by_step = pipe.fit(data, lr_step="step", progress=False)
    by_epoch = pipe.fit(data, progress=False)
    validated = pipe.fit(data, validate=others, progress=False)
    assert judged == [*by_step.losses, *by_epoch.epochs, validated.validation[0]["loss"]]


def test_a_list_of_pairs_is_accepted_as_a_loader() -> None:
    data, pipe = [batch(), batch()], pipeline()
    history = pipe.fit(data, validate=data, progress=False)
    assert history.validation == [pipe.evaluate(data)] == [pipe.evaluate(iter(data))]
    assert torch.equal(pipe.predict(data), torch.cat([pipe.predict(x) for x, _ in data]))
    for look in (pipe.evaluate, pipe.predict):
        with pytest.raises(PipelineError, match="gives no batch"):
            look([])
    with pytest.raises(PipelineError, match="give fit validate="):
        pipe.fit(data, metrics={"error": functional.l1_loss}, progress=False)


# -- in place
class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("kind", [lambda: nn.ELU(inplace=True), lambda: nn.Sequential(nn.ReLU(True), nn.Tanh())])
def test_a_stage_can_begin_with_a_module_that_works_in_place(kind: Callable[[], nn.Module], recompute: str) -> None:
    model, (x, y) = chain(kind()), batch()
    wanted = gradients_alone(copy.deepcopy(model), x, y)
    with pipeline(model, recompute=recompute).batch(x, y) as found:
        for name, gradient in found.gradients().items():
            assert torch.allclose(gradient, wanted[name], rtol=0, atol=1e-12), name


def test_a_stage_of_a_traced_model_can_begin_with_a_module_that_works_in_place() -> None:
    model, (x, y) = chain(nn.ReLU(inplace=True)), batch()
    cut = traced(model, x)
    assert [changes_in_place(link.module) for link in cut.links] == [False, True, False]
    wanted = gradients_alone(copy.deepcopy(model), x, y)
    pipe = Pipeline(split(cut, ROW, at=["1"]), microbatches=3, loss_fn=functional.mse_loss)
    with pipe.batch(x, y) as found:
        assert all(torch.allclose(g, wanted[name], rtol=0, atol=1e-12) for name, g in found.gradients().items())


def test_an_undeclared_in_place_operation_is_refused_with_advice() -> None:
    with pytest.raises(RuntimeError, match="in-place") as told:
        pipeline(chain(Doubled())).step(*batch())
    assert any("out of place" in note for note in told.value.__notes__)
    with pytest.raises(PipelineError, match="out of place"):  # torch raises no error here, and gradients would be wrong
        pipeline(chain(Doubled()), recompute="all").step(*batch())


# -- modes
def test_modules_in_evaluation_mode_stay_in_it_during_training() -> None:
    norm = nn.BatchNorm1d(8).eval().requires_grad_(False)
    norm.running_mean += 1.0
    model, (x, y) = chain(norm, nn.Dropout(0.9).eval()), batch()
    wanted = gradients_alone(copy.deepcopy(model), x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a batch norm in evaluation mode does not depend on micro-batches
        pipe = pipeline(model)
    for _ in range(2):
        with pipe.batch(x, y) as found:
            assert all(torch.allclose(g, wanted[name], rtol=0, atol=1e-12) for name, g in found.gradients().items())
        pipe.predict(x)
    assert torch.equal(pipe.state_dict()["1.running_mean"], norm.running_mean)


def test_deferred_batch_norm_ignores_norms_in_evaluation_mode() -> None:
    pipe = pipeline(chain(nn.BatchNorm1d(8).eval()), batch_norm="deferred")
    pipe.step(*batch())
    assert torch.equal(pipe.state_dict()["1.running_mean"], torch.zeros(8, dtype=torch.double))


def test_a_model_entirely_in_evaluation_mode_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"model\.train\(\)") as told:
        pipe = pipeline(chain(nn.Dropout(0.9)).eval())
    assert told[0].filename == __file__
    (x, y), model = batch(), chain(nn.Dropout(0.9)).eval()
    assert pipe.step(x, y).loss == pytest.approx(functional.mse_loss(model(x), y).item())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(chain().eval(), loss_fn=None, optimizer=None)  # without a warning: it cannot train


def test_train_modes_restore_the_mode_of_each_module() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(), nn.Dropout()))
    model[1].eval()
    model[1][0].train()
    modes = TrainModes([model])
    for training, wanted in ((True, [True, True, False, True, False]), (False, [False] * 5)) * 2:
        modes.set_training(training)
        assert [layer.training for layer in model.modules()] == wanted


def test_a_trace_omits_dropout_in_evaluation_mode() -> None:
    model, (x, _) = chain(nn.Dropout(0.9), nn.Tanh()), batch()
    for rests in (False, True):
        model[1].train(not rests)
        layers = [layer for link in traced(model, x).links for layer in link.module.modules()]
        assert any(isinstance(layer, nn.Dropout) for layer in layers) == (not rests)
        assert model[1].training == (not rests) and model.training


# -- schedules of the user
def test_a_plan_works_for_smaller_batches_and_for_prediction() -> None:
    model, (x, y) = chain(nn.Tanh()), batch(2)
    wanted = gradients_alone(copy.deepcopy(model), x, y)
    pipe = pipeline(model, schedule=PLAN)
    assert torch.allclose(pipe.predict(x), model(x)) and torch.allclose(pipe.predict(x[:1]), model(x[:1]))
    with pipe.batch(x, y) as found:
        assert all(torch.allclose(g, wanted[name], rtol=0, atol=1e-12) for name, g in found.gradients().items())
    with pytest.raises(PipelineError, match="3 micro-batches, not for 2 workers and 4"):
        pipeline(model, schedule=PLAN, microbatches=4)


def test_a_schedule_can_be_a_text_words_or_operations() -> None:
    words = [str(PLAN).splitlines()[0].split(), str(PLAN).splitlines()[1].split()]
    for given in (str(PLAN), lambda workers, microbatches: words, lambda workers, microbatches: str(PLAN)):
        assert pipeline(schedule=given).ops == PLAN.ops
    assert schedule(words).ops == PLAN.ops


@pytest.mark.parametrize("made", [None, 7, [None], [["0F0", 7]], [[["0F0"]]]])
def test_an_invalid_schedule_is_refused_with_the_reason(made: Any) -> None:
    with pytest.raises(PipelineError, match="a list of operations for each worker"):
        pipeline(schedule=lambda workers, microbatches: made)
    with pytest.raises(PipelineError, match="a schedule is a name"):
        pipeline(schedule=made)


def test_a_schedule_function_with_a_result_of_another_size_is_refused() -> None:
    for workers, microbatches in ((4, 3), (2, 8)):
        with pytest.raises(PipelineError, match="of 2 workers and 3 micro-batches"):
            schedule(lambda *_: PLAN.ops, workers=workers, microbatches=microbatches)


# -- errors
class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.min() < -100:
            raise ValueError("a sample that is out of range")
        return x


def test_an_error_in_an_operation_names_the_operation() -> None:
    x, y = batch()
    x[4, 0] = 1e9
    with pytest.raises(ValueError, match="out of range") as told:
        pipeline(chain(Fails())).step(torch.where(x == 1e9, -1e9, x), y)
    (note,) = told.value.__notes__
    assert note.startswith("in F2 of stage 1, the forward of micro-batch 2, in step ")


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("kind", ["loss", "output"])
def test_a_loss_without_a_gradient_is_refused(kind: str, recompute: str) -> None:
    losses = {
        "loss": lambda output, y: functional.mse_loss(output.detach(), y),
        "output": lambda output, y: functional.mse_loss((output > 0).double(), y),
    }
    pipe = pipeline(loss_fn=losses[kind], recompute=recompute)
    with pytest.raises(PipelineError, match="the loss needs no gradient"):
        pipe.step(*batch())


@pytest.mark.parametrize(("loss", "told"), [(lambda o, y: 0.5, "a float"), (lambda o, y: o - y, r"float64\[2, 2\]")])
def test_a_loss_that_is_not_one_number_is_refused(loss: Callable[[Tensor, Tensor], Any], told: str) -> None:
    with pytest.raises(PipelineError, match=f"one number.*{told}"):
        pipeline(loss_fn=loss).step(*batch())


WRONG = {
    "optimizer must be a class and its arguments": {"optimizer": torch.optim.SGD},
    "optimizer must be a class .* not": {"optimizer": (torch.optim.SGD,)},
    "lr_scheduler must be a class and its arguments": {"lr_scheduler": torch.optim.lr_scheduler.StepLR},
    "unknown recompute True": {"recompute": True},
    "checkpoint_every=1.5": {"checkpoint": "here", "checkpoint_every": 1.5},
}


@pytest.mark.parametrize(("told", "given"), [*WRONG.items()])
def test_arguments_of_a_wrong_kind_are_refused(told: str, given: dict[str, Any]) -> None:
    with pytest.raises(PipelineError, match=told):
        pipeline(**given)


def test_a_model_instead_of_stages_invalid_workers_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(PipelineError, match="the result of split"):
        Pipeline(chain())  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="workers must be a list"):
        split(chain(), 2)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match=r"traced\(model, x\)"):
        split(nn.LSTM(1, 1), ROW)
    with pytest.raises(PipelineError, match="it is empty"):
        pipeline().step(*batch(0))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.double))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * functional.mse_loss(output, target)


def test_a_loss_with_parameters_to_train_is_refused(agents: list[Agent]) -> None:
    loss_fn = Weighted()
    with pytest.raises(PipelineError, match=r"loss_fn has parameters of its own \(weight\), which no stage"):
        pipeline(loss_fn=loss_fn)
    pipeline(loss_fn=loss_fn.requires_grad_(False)).step(*batch())


# -- output in notebook cells
def test_check_builds_lazy_modules_and_does_not_keep_them() -> None:
    torch.manual_seed(0)
    stages = split([lazy(nn.Linear, 4, 8), nn.Tanh(), lazy(nn.Linear, 8, 2)], ROW, balance=[1, 2])
    found = stages.check(torch.randn(3, 4))
    assert found.difference == 0.0 and [c.values for c in found.crossings] == [("float32[3, 8]",)]
    assert not list(itertools.chain.from_iterable(link.module.parameters() for link in stages.links))


def test_the_reprs_of_results_stages_and_pipelines_are_short() -> None:
    pipe = pipeline()
    result = pipe.step(*batch())
    assert repr(result).startswith(f"<step {result.step}: loss {result.loss:.6g} of 6 samples, idle ")
    assert repr(split(chain(), ROW)) == "<Stages balanced, from 2 modules, for worker1, worker2>"
    assert repr(pipe) == "<Pipeline of 2 stages (0 on worker1, 1 on worker2), 3 micro-batches>"


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(16, 16), reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: self.linear(x).tanh(), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_activation_checkpointing_within_a_stage_has_the_same_gradients(agents: list[Agent], schedule: str) -> None:
    net, (x, y) = small.model(Checkpointed(reentrant=False)), small.data(12)
    pipe = small.pipeline(copy.deepcopy(net), schedule=schedule, optimizer=small.SGD)
    small.step_alike(pipe, net, functional.cross_entropy(net(x), y), x, y)


def test_reentrant_activation_checkpointing_is_refused_with_advice(agents: list[Agent]) -> None:
    pipe = small.pipeline(small.model(Checkpointed(reentrant=True)), optimizer=small.SGD)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        pipe.step(*small.data(12))
