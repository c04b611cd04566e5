# SPDX-License-Identifier: Apache-2.0
"""LoRA on the K/V projections, and on some of q, k and v alone: of the layers with a KV cache and of KV-shared ones."""

import pytest

from tests.harness.checkpoints import make_adapter, make_checkpoint
from tests.harness.compare import assert_equal, run_off_and_on
from tests.harness.workload import SLIDING_BEFORE, Request, play, prompt_of, tokens_of

pytestmark = pytest.mark.plugin_only

KINDS = {"k and v": ["q_proj", "k_proj", "v_proj"], "no v": ["q_proj", "k_proj"], "no q": ["k_proj", "v_proj"]}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("lora")
    checkpoint = make_checkpoint(folder / "checkpoint", **SLIDING_BEFORE)
    adapters = [
        LoRARequest(kind, number, str(make_adapter(folder / kind, checkpoint, modules, seed=1)))
        for number, (kind, modules) in enumerate(KINDS.items(), start=1)
    ]
    requests = [Request(prompt_of(200), lora=adapter) for adapter in (*adapters, None)]
    requests += [
        Request(prompt_of(length), lora=adapter) for length, adapter in zip((5, 77, 300), adapters, strict=True)
    ]
    settings = {"enable_lora": True, "max_loras": len(KINDS), "max_lora_rank": 8, "prompt_batch_cap": 4}
    return run_off_and_on(checkpoint, {"mixed": lambda llm: tokens_of(play(llm, requests))}, **settings)["mixed"]


def test_adapters_of_kv_projections(outcome):
    off, on = outcome
    assert_equal(off, on)
    assert max(len(p.query_lens) for p in on.prompt_passes) == 4


def test_each_adapter_matters(outcome):
    assert len({tuple(tokens) for [tokens] in outcome[1].result[: len(KINDS) + 1]}) == len(KINDS) + 1
