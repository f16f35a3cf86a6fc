"""Gradient accumulation: several batches in one step have the gradients of all their samples as one batch."""

from __future__ import annotations

import pytest
import torch
from small import SGD, data, grads, model, pipeline, same
from torch import nn
from torch.nn import functional

from rpcbench.pipeline import PipelineError
from rpcbench.runtime.agent import Agent

BATCHES = [data(24, 1), data(7, 2), data(2, 3)]  # the last one has fewer samples than micro-batches
WHOLE = (torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES]))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulated_gradients_equal_those_of_one_whole_batch(
    agents: list[Agent], schedule: str, reduction: str
) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, reduction=reduction)

    net = model()
    loss = loss_fn(net(WHOLE[0]), WHOLE[1])
    loss.backward()
    with pipeline(schedule=schedule, loss_fn=loss_fn, loss_reduction=reduction).accumulate() as batch:
        for x, y in BATCHES:
            alone = loss_fn(model()(x), y).item()
            assert batch.add(x, y).loss == pytest.approx(alone, rel=1e-12)
        same(batch.gradients(), grads(net))
        assert batch.loss == pytest.approx(loss.item(), rel=1e-12)


def test_reading_gradients_between_two_batches_does_not_change_them(agents: list[Agent]) -> None:
    first, whole = model(), model()
    functional.cross_entropy(first(BATCHES[0][0]), BATCHES[0][1]).backward()
    functional.cross_entropy(whole(WHOLE[0]), WHOLE[1]).backward()
    with pipeline().accumulate() as batch:
        batch.add(*BATCHES[0])
        same(batch.gradients(), grads(first))
        batch.add(*BATCHES[1])
        batch.gradients()
        batch.add(*BATCHES[2])
        same(batch.gradients(), grads(whole))


def test_accumulated_training_equals_one_process_and_unapplied_gradients_are_dropped(agents: list[Agent]) -> None:
    net, pipe = model(), pipeline(optimizer=SGD)
    optimizer = torch.optim.SGD(net.parameters(), **SGD[1])
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(net(WHOLE[0]), WHOLE[1]).backward()
        optimizer.step()
        with pipe.accumulate() as dropped:
            dropped.add(*BATCHES[1])
        with pipe.accumulate() as batch:
            for x, y in BATCHES:
                batch.add(x, y)
            batch.apply()
    same(pipe.state_dict(), net.state_dict())


def test_accumulated_gradients_can_be_applied_only_once(agents: list[Agent]) -> None:
    with pipeline(optimizer=SGD).accumulate() as batch:
        with pytest.raises(PipelineError, match=r"call add\(x, y\) first"):
            batch.apply()
        batch.add(*BATCHES[0])
        batch.apply()
        for again in (batch.apply, lambda: batch.add(*BATCHES[0])):
            with pytest.raises(PipelineError, match="have been applied; leave the block"):
                again()


class Breaks(nn.Module):
    """Raises for samples that are not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.isfinite().all():
            raise ArithmeticError("not finite")
        return x


def test_accumulated_gradients_cannot_be_applied_after_a_failed_add(agents: list[Agent]) -> None:
    pipe = pipeline(model(Breaks()), optimizer=SGD)
    before = pipe.state_dict()
    with pipe.accumulate() as batch:
        batch.add(*BATCHES[0])
        with pytest.raises(ArithmeticError, match="not finite"):
            batch.add(torch.full((8, 6), torch.inf, dtype=torch.double), BATCHES[0][1][:8])
        for use in (batch.apply, batch.gradients, lambda: batch.add(*BATCHES[1])):
            with pytest.raises(PipelineError, match="incomplete"):
                use()
    same(pipe.state_dict(), before)
