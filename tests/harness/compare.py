# SPDX-License-Identifier: Apache-2.0
"""Two engines that differ in the flag alone, under the same requests and schedule; and the oracle nobody here wrote,
transformers' Gemma 4 on the same weights: eager attention, float32, no cache."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM

from tests.harness import engine
from tests.harness.record import Pass, record_passes


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


@torch.inference_mode()
def reference_logits(path: Path | str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Per prompt, the float32 logits of all its positions: [len(prompt), vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]


def reference_first_tokens(path: Path | str, prompts: list[list[int]]) -> list[int]:
    """The token greedy decoding puts after each prompt."""
    return [int(logits[-1].argmax()) for logits in reference_logits(path, prompts)]
