# SPDX-License-Identifier: Apache-2.0
"""Prompts, requests and their arrival, and how an engine serves them."""

import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.forward_context import get_forward_context
from vllm.sampling_params import RequestOutputKind

from tests.harness import engine
from tests.harness.checkpoints import FIRST_TEXT_TOKEN, VOCAB_SIZE

BLOCK = 128
SLIDING, FULL = "sliding_attention", "full_attention"
# Checkpoints with one KV-shared layer of each kind, which is enough here and quick; named by the layer before them.
FULL_BEFORE = {"num_layers": 4, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
SLIDING_BEFORE = {"num_layers": 5, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL]}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random text; prompts of different seeds have no prefix in common."""
    choose = random.Random(1000 * seed + length)
    return [choose.randrange(FIRST_TEXT_TOKEN, VOCAB_SIZE) for _ in range(length)]


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    return [prompt_of(length, seed) for length in lengths]


@dataclass
class Request:
    prompt: list[int]
    arrives: int = 0  # after so many steps of the engine
    aborted: int | None = None  # after so many steps of the engine
    max_tokens: int = 4
    sampling: dict[str, Any] = field(default_factory=dict)  # greedy, and no early end, where it says nothing
    lora: Any = None

    def params(self) -> SamplingParams:
        defaults = {"temperature": 0.0, "max_tokens": self.max_tokens, "ignore_eos": True}
        return SamplingParams(**defaults | self.sampling, output_kind=RequestOutputKind.FINAL_ONLY)


def play(llm: LLM, requests: list[Request]) -> list[RequestOutput | None]:
    """The final output of each request, None if it was aborted."""
    outputs: dict[str, RequestOutput] = {}
    step, deadline = 0, time.monotonic() + 120  # no limit of steps: while a grammar is compiled, they do nothing
    while step <= max(r.arrives for r in requests) or llm.llm_engine.has_unfinished_requests():
        for index, request in enumerate(requests):
            if request.arrives == step:
                prompt = TokensPrompt(prompt_token_ids=request.prompt)
                llm.llm_engine.add_request(str(index), prompt, request.params(), lora_request=request.lora)
            if request.aborted == step:
                llm.llm_engine.abort_request([str(index)])
        outputs |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        step += 1
        assert time.monotonic() < deadline, "the engine does not finish"
    return [outputs.get(str(index)) for index in range(len(requests))]


class HalfWay(Exception):
    pass


def play_raising_half_way(llm: LLM, requests: list[Request]) -> list[RequestOutput | None]:
    """As `play`, but the first pass raises in the last layer, and is then run once more.

    What is prepared for a whole pass must be as it was before: its metadata, cos and sin, and the mask of adapters.
    """
    from vllm_gaudi.extension.ops import LoraMask

    model = engine.text_model_of(llm)
    forward = model.forward
    rotary_modules = {layer.self_attn.rotary_emb for layer in model.layers}
    raised = []

    def prepared() -> tuple[Any, list[torch.Tensor]]:
        cos_sin = [getattr(module, name, None) for module in rotary_modules for name in ("cos", "sin")]
        tensors = [x.clone() for x in (*cos_sin, LoraMask.getLoraMask()) if x is not None]
        return get_forward_context().attn_metadata, tensors

    def interrupt(module: torch.nn.Module, args: Any) -> None:
        raised.append(module)
        raise HalfWay

    def interrupted_once(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not raised:
            metadata, tensors = prepared()
            hook = model.layers[-1].mlp.register_forward_pre_hook(interrupt)
            with pytest.raises(HalfWay):
                forward(*args, **kwargs)
            hook.remove()
            metadata_after, tensors_after = prepared()
            assert metadata_after is metadata
            assert len(tensors) == 2 + any(r.lora for r in requests)
            torch.testing.assert_close(tensors_after, tensors, rtol=0, atol=0)
        return forward(*args, **kwargs)

    model.forward = interrupted_once
    try:
        return play(llm, requests)
    finally:
        model.forward = forward
        assert raised


def tokens_of(outputs: list[RequestOutput | None]) -> list[list[list[int]] | None]:
    return [o and [list(completion.token_ids) for completion in o.outputs] for o in outputs]
