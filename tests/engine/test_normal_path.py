# SPDX-License-Identifier: Apache-2.0
"""Where prompts take the normal path, or there is nothing to skip: one line says why."""

import gc
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig
from vllm import TokensPrompt
from vllm.model_executor.models.registry import ModelRegistry

from tests import hosts
from tests.harness import engine
from tests.harness.checkpoints import config_without_layers, make_checkpoint
from tests.harness.engine import engine_config
from tests.harness.process import said, vllm_log
from tests.harness.record import count_rows, takes_normal_path
from tests.harness.workload import prompts_of
from vllm_gaudi_ext.config import Fast, Normal, decide

FLAG = "--kv-sharing-fast-prefill"
PROMPTS = prompts_of([5, 200])


def assert_no_cuda_graph_buffers(llm):
    """Upstream holds these for CUDA graphs if the flag is on: nothing reads them on HPU."""
    model, config = engine.text_model_of(llm), engine.runner_of(llm).vllm_config
    assert not model.fast_prefill_enabled
    for name in ("positions", "hidden_states", "per_layer_inputs"):
        assert not hasattr(model, name)
    tokens, text = config.scheduler_config.max_num_batched_tokens, config.model_config.hf_text_config
    held = {(tokens, text.hidden_size), (tokens, text.num_hidden_layers, text.hidden_size_per_layer_input)}
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    assert not [tuple(t.shape) for t in tensors if tuple(t.shape) in held]


def test_merged_prefill_takes_the_normal_path(e2b):
    with vllm_log() as log:
        llm = engine.make_llm(e2b, fast=True, env={"VLLM_MERGED_PREFILL": "true"})
    try:
        assert takes_normal_path(llm, PROMPTS)
        assert_no_cuda_graph_buffers(llm)
    finally:
        engine.close(llm)
    ((level, message),) = said(log)
    assert level == logging.WARNING
    assert "VLLM_MERGED_PREFILL" in message
    assert "normal path" in message


FEATURES = SimpleNamespace(  # of the plugin, for Gemma 4, by default
    flatten_input=True,
    merged_prefill=False,
    prompt_attn_impl="fsdpa_impl",
    enable_fsdpa_slicing=False,
    bucketing_strategy="exp",
)

NORMAL_PATH = {
    "QUANT_CONFIG": {},
    "pooling": {"runner": "pooling"},
    "--kv-transfer-config": {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
}


@pytest.mark.parametrize("reason", NORMAL_PATH)
def test_reasons_for_the_normal_path(reason, e2b, monkeypatch):
    config = engine_config(e2b, **NORMAL_PATH[reason])
    if reason == "QUANT_CONFIG":
        assert isinstance(decide(config, FEATURES), Fast)
        monkeypatch.setenv("QUANT_CONFIG", "quantization.json")
    verdict = decide(config, FEATURES)
    assert isinstance(verdict, Normal)
    assert reason in verdict.reason


ATTENTION = {
    "flex": {"VLLM_PROMPT_USE_FLEX_ATTENTION": "true"},
    "slices": {"VLLM_BUCKETING_STRATEGY": "pad", "VLLM_HPU_FSDPA_SLICE_ENABLED": "true"},
}


@pytest.mark.plugin_only
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_that_does_not_see_what_the_mask_shows_takes_the_normal_path(kind, e2b):
    with vllm_log() as log:
        llm = engine.make_llm(e2b, fast=True, env=ATTENTION[kind])
    try:
        assert takes_normal_path(llm, PROMPTS)
    finally:
        engine.close(llm)
    ((_, message),) = said(log)
    assert kind in message
    assert next(iter(ATTENTION[kind])) in message


def test_other_models_around_gemma_4_take_the_normal_path(tmp_path, monkeypatch):
    """They build its language model, too, under a name of their own."""
    checkpoint = make_checkpoint(tmp_path)
    other = "OtherForConditionalGeneration"
    monkeypatch.setitem(ModelRegistry.models, other, None)
    ModelRegistry.register_model(other, "vllm_gaudi.models.gemma4:HpuGemma4ForConditionalGeneration")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"architectures": [other]}))
    with vllm_log() as log:
        llm = engine.make_llm(checkpoint, fast=True)
    try:
        assert takes_normal_path(llm, PROMPTS)
        assert_no_cuda_graph_buffers(llm)
    finally:
        engine.close(llm)
    ((level, message),) = said(log)
    assert level == logging.WARNING
    assert f"normal path: {other} is not supported" in message


@pytest.mark.plugin_only
def test_pooling_reads_every_token(e2b):
    """The embedding of each token is transformers' last hidden state, normalized."""
    with vllm_log() as log:
        llm = engine.make_llm(e2b, fast=True, runner="pooling", pooler_config={"task": "token_embed"})
    try:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        outputs = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    finally:
        engine.close(llm)
    ((level, message),) = said(log)
    assert level == logging.WARNING
    assert "pooling" in message
    model = AutoModelForCausalLM.from_pretrained(e2b, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        torch.testing.assert_close(
            output.outputs.data, torch.nn.functional.normalize(states, dim=-1), rtol=1e-3, atol=1e-4
        )


def test_inert_without_kv_sharing(no_kv_sharing):
    llm = engine.make_llm(no_kv_sharing, fast=False)
    expected = engine.generate(llm, PROMPTS)
    engine.close(llm)
    with vllm_log() as log:
        llm = engine.make_llm(no_kv_sharing, fast=True)
    try:
        assert engine.generate(llm, PROMPTS) == expected
        assert takes_normal_path(llm, PROMPTS)
        assert_no_cuda_graph_buffers(llm)
    finally:
        engine.close(llm)
    ((level, message),) = said(log)
    assert level == logging.INFO
    assert "off" in message
    assert "no KV-shared layers" in message


SLIDING, FULL = "sliding_attention", "full_attention"


def test_all_layers_shared_start_as_without_the_flag(e2b, tmp_path):
    """vLLM itself cannot build such a model; this package has nothing to add to what it says."""
    config = config_without_layers(e2b)
    fields = {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL]}
    config["text_config"] = Gemma4TextConfig(**(config["text_config"] | fields)).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        (tmp_path / name).write_bytes((e2b / name).read_bytes())
    raised = []
    for fast in (False, True):
        with pytest.raises(Exception) as info:
            engine.make_llm(tmp_path, fast=fast, load_format="dummy")
        raised.append((type(info.value), str(info.value)))
    assert raised[0] == raised[1]


def test_buffers_for_cuda_graphs_are_freed_and_hidden_states_can_be_captured(e2b):
    llm = engine.make_llm(e2b, fast=True)
    model = engine.text_model_of(llm)
    forward = model.forward
    captured = []

    def capture(*args, **kwargs):
        """Of what the model returns if layers are captured, the runner without a drafter knows the first half."""
        hidden_states = forward(*args, **kwargs)
        if isinstance(hidden_states, tuple):
            captured.append(hidden_states[1])
            hidden_states = hidden_states[0]
        return hidden_states

    try:
        assert_no_cuda_graph_buffers(llm)
        expected = engine.generate(llm, PROMPTS)
        with count_rows(llm) as reduced:
            engine.generate(llm, PROMPTS, max_tokens=1)
        assert len(set(reduced[0])) > 1
        model.forward, model.aux_hidden_state_layers = capture, (2,)
        llm.reset_prefix_cache()
        with count_rows(llm) as whole:
            assert engine.generate(llm, PROMPTS) == expected
        assert all(len(set(rows)) == 1 for rows in whole)
        assert bool(captured) == (hosts.name() == "plugin")  # the stand-in has no hidden states to capture
    finally:
        model.__dict__.pop("forward", None)
        engine.close(llm)
