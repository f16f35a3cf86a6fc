"""`keep_gradients`: the gradients of the latest step, after it has ended."""

from __future__ import annotations

import pytest
import torch
from small import SGD, data, grads, model, pipeline, same
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from worlds import until

from rpcbench.pipeline import PipelineError
from rpcbench.runtime.agent import Agent


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_kept_gradients_equal_those_of_one_process_and_keep_no_context(agents: list[Agent], schedule: str) -> None:
    net, pipe = model(), pipeline(schedule=schedule, optimizer=SGD, keep_gradients=True)
    optimizer = torch.optim.SGD(net.parameters(), **SGD[1])
    for seed in range(3):
        x, y = data(29, seed)
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        pipe.step(x, y)
        same(pipe.gradients(), grads(net))
        until(lambda: not any(agent.tables()["contexts"] for agent in agents), "the step's context to be released")
        same(pipe.gradients(), grads(net))
    assert list(pipe.gradients()) == list(net.state_dict())


def test_clipped_gradients_are_kept_and_unapplied_ones_are_not(agents: list[Agent]) -> None:
    net, (x, y) = model(), data(29)
    pipe = pipeline(optimizer=SGD, keep_gradients=True)
    functional.cross_entropy(net(x), y).backward()
    clip_grad_norm_(net.parameters(), 0.01)
    pipe.fit([(x, y)], clip=0.01, progress=False)
    with pipe.batch(*data(24, 1)):
        pass
    same(pipe.gradients(), grads(net))


def test_reading_gradients_that_are_not_kept_is_refused(agents: list[Agent]) -> None:
    pipe = pipeline(optimizer=SGD)
    pipe.step(*data(24))
    with pytest.raises(PipelineError, match=r"keep_gradients=True, or read them in `with pipe\.batch"):
        pipe.gradients()
    with pytest.raises(PipelineError, match="no step has been applied yet"):
        pipeline(optimizer=SGD, keep_gradients=True).gradients()
