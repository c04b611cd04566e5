# SPDX-License-Identifier: Apache-2.0
"""Settings that fast prefill cannot honour are refused, with a message that says what to change."""

import pytest
from transformers import Gemma4AssistantConfig, LlamaConfig

from tests.harness import engine
from tests.harness.checkpoints import config_without_layers, make_checkpoint
from tests.harness.engine import engine_config
from tests.harness.workload import prompts_of

FLAG = "--kv-sharing-fast-prefill"
PROMPTS = prompts_of([5, 200])


REFUSED = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "pipeline": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_refused_at_start(setting, e2b, no_kv_sharing):
    with pytest.raises(ValueError) as refusal:
        engine_config(e2b, **REFUSED[setting])
    message = str(refusal.value)
    for option in REFUSED[setting]:
        assert f"set --{option.replace('_', '-')} " in message
    assert f"or drop {FLAG}" in message
    # The same setting is none of this package's business without the flag, and where there is nothing to skip.
    engine_config(e2b, fast=False, **REFUSED[setting])
    engine_config(no_kv_sharing, **REFUSED[setting])


def test_full_warmup_is_refused_with_prefix_caching(e2b, monkeypatch):
    """It leaves out the pass of a request that resumes from cached blocks, and the plugin then stops at that pass."""
    monkeypatch.setenv("VLLM_FULL_WARMUP", "true")
    with pytest.raises(ValueError, match=f"VLLM_FULL_WARMUP.*--no-enable-prefix-caching, or drop {FLAG}"):
        engine_config(e2b)
    engine_config(e2b, enable_prefix_caching=False)
    engine_config(e2b, fast=False)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_drafting_from_hidden_states_is_refused_by_vllm(method, e2b, tmp_path):
    if method == "mtp":
        text = config_without_layers(e2b)["text_config"]
        text |= {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention"] * 2}
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False}
        draft = Gemma4AssistantConfig(text_config=text, architectures=["Gemma4AssistantForCausalLM"])
    else:
        draft = LlamaConfig(vocab_size=320, num_hidden_layers=1, architectures=["LlamaForCausalLM"])
    draft.save_pretrained(tmp_path)
    speculative = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 1}
    with pytest.raises(ValueError, match="[Ff]ast prefill.*not compatible with EAGLE"):
        engine_config(e2b, speculative_config=speculative)


def test_text_only_needs_flattened_prompts(tmp_path):
    checkpoint = make_checkpoint(tmp_path, architecture="Gemma4ForCausalLM")
    with pytest.raises(ValueError, match=f"{FLAG}.*set VLLM_FLATTEN_INPUT=1"):
        engine.make_llm(checkpoint, fast=True)
