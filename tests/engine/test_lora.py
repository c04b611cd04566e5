# SPDX-License-Identifier: Apache-2.0
"""LoRA: two adapters of two kinds and the base model in one padded pass."""

import pytest

from tests.harness.checkpoints import make_adapter, make_checkpoint
from tests.harness.compare import assert_equal, run_off_and_on
from tests.harness.workload import FULL_BEFORE, Request, play, play_raising_half_way, prompt_of, tokens_of

pytestmark = pytest.mark.plugin_only


@pytest.fixture(scope="module", params=[1, 4], ids="cap {}".format)
def outcomes(request, tmp_path_factory):
    from vllm.lora.request import LoRARequest

    folder = tmp_path_factory.mktemp("lora")
    checkpoint = make_checkpoint(folder / "checkpoint", **FULL_BEFORE)
    kinds = {"attention": ["q_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
    attention, mlp = (
        LoRARequest(kind, seed, str(make_adapter(folder / kind, checkpoint, modules, seed)))
        for seed, (kind, modules) in enumerate(kinds.items(), start=1)
    )

    same = [Request(prompt_of(200), lora=adapter) for adapter in (attention, mlp, None)]
    requests = [*same, Request(prompt_of(77), lora=mlp), Request(prompt_of(5), lora=attention)]
    scenarios = {
        "mixed": lambda llm: tokens_of(play(llm, requests)),
        "raising half-way": lambda llm: tokens_of(play_raising_half_way(llm, requests)),
    }
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "prompt_batch_cap": request.param}
    return request.param, run_off_and_on(checkpoint, scenarios, **settings)


def test_adapters_and_base_in_one_pass(outcomes):
    cap, scenarios = outcomes
    off, on = scenarios["mixed"]
    assert_equal(off, on)
    assert max(len(p.query_lens) for p in on.prompt_passes) == cap
    assert len({tuple(tokens) for [tokens] in on.result[:3]}) == 3


def test_pass_that_raises_leaves_the_adapters_mask(outcomes):
    assert_equal(*outcomes[1]["raising half-way"])
