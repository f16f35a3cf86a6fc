"""Small models of Hugging Face's transformers, made from their configurations: traced, cut, and trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import step_alike
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from rpcbench.pipeline import Pipeline, split, traced
from rpcbench.runtime.agent import Agent

SMALL: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}
SIZES: dict[str, Any] = {**SMALL, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(**SMALL, n_positions=16, n_embd=8, n_layer=2, n_head=2))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, max_position_embeddings=16))


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**SIZES, num_attention_heads=2, max_position_embeddings=16))


MODELS = {gpt2: "transformer.h.1", llama: "model.layers.1", bert: "bert.encoder.layer.1"}


def made(model: Any) -> nn.Module:
    torch.manual_seed(3)
    found: nn.Module = model().double()
    return found


def data(samples: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, 32, (samples, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[: samples // 2, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """A loss that uses a field of `output`, as the code of transformers does."""
    logits = output.logits.flatten(0, -2)
    return functional.cross_entropy(logits, target.flatten()[: len(logits)])


@pytest.mark.parametrize("model", MODELS)
def test_the_stages_of_a_transformer_equal_the_model(model: Any) -> None:
    net = made(model)
    stages = split(traced(net, data(4)), ["worker1", "worker2"], at=[MODELS[model]])
    assert stages.check(data(7)).difference == 0
    assert {key for stage in stages.cut() for key, _ in stage.named_tensors()} >= net.state_dict().keys()


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
def test_a_traced_language_model_trains_like_the_model(agents: list[Agent], schedule: str) -> None:
    net, x = made(llama), data(8)
    y = x["input_ids"].roll(-1, 1)
    stages = split(traced(made(llama), data(4)), ["worker1", "worker2"], at=["model.layers.1"])
    pipe = Pipeline(stages, schedule, 4, loss_fn, (torch.optim.SGD, {"lr": 0.1}))
    step_alike(pipe, net, loss_fn(net(**x), y), x, y)
    found = pipe.predict(x)
    assert type(found) is type(net(**x)) and found.logits.shape == (8, 6, 32)
