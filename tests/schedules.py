# SPDX-License-Identifier: Apache-2.0
"""Scenarios on two engines that differ in the flag alone: same requests, same schedule; what came out, and which rows
the layers of each forward pass saw."""

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.forward_context import get_forward_context
from vllm.sampling_params import RequestOutputKind

from tests import engine
from tests.checkpoints import FIRST_TEXT_TOKEN, VOCAB_SIZE

BLOCK = 128
SLIDING, FULL = "sliding_attention", "full_attention"
# Checkpoints with one KV-shared layer of each kind, which is enough here and quick; named by the layer before them.
FULL_BEFORE = {"num_layers": 4, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
SLIDING_BEFORE = {"num_layers": 5, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL]}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random text; prompts of different seeds have no prefix in common."""
    choose = random.Random(1000 * seed + length)
    return [choose.randrange(FIRST_TEXT_TOKEN, VOCAB_SIZE) for _ in range(length)]


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


@dataclass(eq=False)
class Pass:
    """A forward pass, as its metadata describes it and as its layers saw it."""

    is_prompt: bool
    rows: list[int] = field(default_factory=list)  # of each layer
    padded_len: int = 1
    query_lens: list[int] = field(default_factory=list)  # of a prompt pass, for each sequence, 0 for padding
    context_lens: list[int] = field(default_factory=list)
    context_blocks: list[int] = field(default_factory=list)
    last_hidden: torch.Tensor | None = None  # of a prompt pass, each real sequence's last row of the model's output
    graph_key: tuple[Any, ...] = ()  # what a captured graph is found by: shapes of tensors, other values as they are

    def schedule(self) -> tuple[Any, ...]:
        return self.is_prompt, self.padded_len, self.query_lens, self.context_lens, self.context_blocks

    def spans(self) -> list[tuple[int, int]]:
        """Of each sequence of a prompt pass: cached tokens in front of it, and tokens up to its end."""
        return [(c, c + q) for c, q in zip(self.context_lens, self.query_lens, strict=True) if q]


def _graph_key(metadata: Any) -> tuple[Any, ...]:
    fields = metadata._asdict()
    return tuple((k, tuple(v.shape) if isinstance(v, torch.Tensor) else v) for k, v in sorted(fields.items()))


@contextmanager
def record_passes(llm: LLM) -> Iterator[list[Pass]]:
    passes: list[Pass] = []

    model = engine.text_model_of(llm)
    forward = model.forward

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata
        now = Pass(metadata.is_prompt, graph_key=_graph_key(metadata))
        passes.append(now)
        if metadata.is_prompt:
            now.padded_len = metadata.slot_mapping.shape[1]
            now.query_lens = metadata.seq_lens_tensor.tolist()
            now.context_lens = metadata.context_lens_tensor.tolist()
            if metadata.block_list is not None:
                now.context_blocks = metadata.block_list[: -(-max(now.context_lens) // BLOCK)].tolist()
        hidden_states = forward(*args, **kwargs)
        if metadata.is_prompt:
            last = [i * now.padded_len + length - 1 for i, length in enumerate(now.query_lens) if length]
            now.last_hidden = hidden_states[last].clone()
        return hidden_states

    model.forward = recorded  # not a hook: vLLM's compilation decorator calls it without any
    try:
        with engine.count_rows(llm) as rows:
            yield passes
    finally:
        del model.forward
    for now, seen in zip(passes, rows, strict=True):
        now.rows = seen


@dataclass
class Outcome:
    """Of one scenario on one engine."""

    result: Any  # what the scenario returned
    passes: list[Pass]
    first_shared: int  # the index of the first KV-shared layer

    @property
    def prompt_passes(self) -> list[Pass]:
        return [p for p in self.passes if p.is_prompt]


Scenario = Callable[[LLM], Any]


def run_off_and_on(
    checkpoint: Path, scenarios: dict[str, Scenario], **settings: Any
) -> dict[str, tuple[Outcome, Outcome]]:
    """For each scenario, its outcome without and with the flag. All scenarios share the two engines."""
    outcomes: list[dict[str, Outcome]] = []
    for fast in (False, True):
        gc.freeze()  # a starting engine collects garbage ten times, each time half a second of looking at imports
        llm = engine.make_llm(checkpoint, fast=fast, **settings)
        first_shared = [layer.self_attn.is_kv_shared_layer for layer in engine.layers_of(llm)].index(True)
        outcomes.append({})
        try:
            for name, scenario in scenarios.items():
                with record_passes(llm) as passes:
                    result = scenario(llm)
                outcomes[-1][name] = Outcome(result, passes, first_shared)
                llm.reset_prefix_cache()
        finally:
            engine.close(llm)
    return {name: (outcomes[0][name], outcomes[1][name]) for name in scenarios}


def tokens_of(outputs: list[RequestOutput | None]) -> list[list[list[int]] | None]:
    return [o and [list(completion.token_ids) for completion in o.outputs] for o in outputs]


def assert_equal(off: Outcome, on: Outcome) -> None:
    """Same results under the same schedule, and in every prompt pass the KV-shared layers saw one row a sequence."""
    assert on.result == off.result
    assert_reduced(off, on)


def assert_reduced(off: Outcome, on: Outcome) -> None:
    """Same schedule, and in every prompt pass the KV-shared layers saw one row per sequence. (So may the one before.)

    Hidden states are compared too: only the first token of a request comes out of a prompt pass, and greedy choices
    forgive small errors.
    """
    assert [p.schedule() for p in on.passes] == [p.schedule() for p in off.passes]
    assert on.prompt_passes
    rows_of_graph: dict[tuple[Any, ...], list[int]] = {}
    for whole, reduced in zip(off.passes, on.passes, strict=True):
        assert rows_of_graph.setdefault(reduced.graph_key, reduced.rows) == reduced.rows
        assert len(set(whole.rows)) == 1
        if not reduced.is_prompt:
            assert reduced.rows == whole.rows
            continue
        batch = len(reduced.query_lens)
        assert whole.rows[0] == batch * whole.padded_len
        assert reduced.rows[: on.first_shared - 1] == whole.rows[: on.first_shared - 1]
        assert reduced.rows[on.first_shared :] == [batch] * (len(reduced.rows) - on.first_shared)
        torch.testing.assert_close(reduced.last_hidden, whole.last_hidden, rtol=1e-4, atol=1e-4)
