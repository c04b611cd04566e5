# SPDX-License-Identifier: Apache-2.0
"""Settings that fast prefill cannot honour: refused with a message that names them, or the normal path with one line
that says why."""

import gc
import importlib
import importlib.metadata
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4TextConfig, LlamaConfig
from vllm import EngineArgs, TokensPrompt
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins

from tests import hosts
from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.process import inspect_models_here, vllm_log
from tests.harness.record import count_rows
from tests.harness.workload import prompts_of
from vllm_gaudi_ext.config import Fast, Normal, decide

FLAG = "--kv-sharing-fast-prefill"
PROMPTS = prompts_of([5, 200])


@pytest.fixture(autouse=True)
def _inspect_models_here(monkeypatch):
    inspect_models_here(monkeypatch.setattr)


def engine_config(model, *, fast=True, **settings):
    """The configuration of an engine, checked as vLLM does before it loads anything."""
    hosts.reset()
    load_general_plugins()
    defaults = {"dtype": "float32", "max_model_len": 1024, "limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0}}
    arguments = {**defaults, "model": str(model), "kv_sharing_fast_prefill": fast, **settings}
    return EngineArgs(**arguments).create_engine_config()


def config_without_layers(checkpoint):
    """For other numbers of layers: newer transformers write what single layers have by the layers' indices."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"].pop("per_layer_config", None)
    return config


def said(log):
    """What this package logged: [(level, message)]."""
    return [(r.levelno, r.getMessage()) for r in log if r.name.startswith("vllm.vllm_gaudi_ext")]


def takes_normal_path(llm):
    """Whether the decoder is the plugin's own, and every layer of it sees every row of a prompt pass."""
    modules = [engine.text_model_of(llm), *(layer.self_attn.attn.impl for layer in engine.layers_of(llm))]
    modules += [layer.self_attn.attn.attn_backend for layer in engine.layers_of(llm)]
    classes = [module if isinstance(module, type) else type(module) for module in modules]
    with count_rows(llm) as passes:
        engine.generate(llm, PROMPTS, max_tokens=2)
    assert passes
    rows = all(len(set(rows)) == 1 for rows in passes)
    return rows and not any(cls.__module__.startswith("vllm_gaudi_ext") for cls in classes)


# At start: refused while the configuration is built


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


# Models in which there is nothing to skip


@pytest.fixture(scope="session")
def no_kv_sharing(tmp_path_factory):
    """As the 31B and 26B-A4B models have it."""
    return make_checkpoint(tmp_path_factory.mktemp("no_kv_sharing"), num_kv_shared_layers=0, num_layers=5)


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


# At load: nothing but what is supported


def renamed(monkeypatch):
    """A parameter of a function that this package wraps has another name."""
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    original = HPUModelRunner._form_prefill_batch

    def _form_prefill_batch(self, batch_contents):
        return original(self, batch_contents)

    _form_prefill_batch.__module__ = HPUModelRunner.__module__
    _form_prefill_batch.__qualname__ = "HPUModelRunner._form_prefill_batch"
    monkeypatch.setattr(HPUModelRunner, "_form_prefill_batch", _form_prefill_batch)
    return ["vllm_gaudi.v1.worker.hpu_model_runner.HPUModelRunner._form_prefill_batch", "'contents'"]


def removed(monkeypatch):
    """A method that this package wraps is gone."""
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    monkeypatch.delattr(HPUModelRunner, "_form_prefill_batch")
    return ["vllm_gaudi.v1.worker.hpu_model_runner.HPUModelRunner", "has no '_form_prefill_batch'"]


def another_version(monkeypatch):
    original = importlib.metadata.version
    versions = {"vllm-gaudi": "0.25.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or original(name))
    return ["vllm-gaudi 0.25.1", "0.26"]


@pytest.mark.parametrize("change", [renamed, removed, another_version])
def test_load_stops_where_the_plugin_is_not_what_is_supported(change, e2b, monkeypatch):
    expected = change(monkeypatch)
    with pytest.raises(ValueError) as refusal:
        engine.make_llm(e2b, fast=True)
    message = str(refusal.value)
    assert all(part in message for part in expected)
    assert f"or drop {FLAG}" in message


def newer(monkeypatch):
    original = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.99.1" if n == "vllm-gaudi" else original(n))


def test_newer_release_without_drift_works_with_one_warning(e2b, monkeypatch):
    newer(monkeypatch)
    with vllm_log() as log:
        llm = engine.make_llm(e2b, fast=True)
    try:
        with count_rows(llm) as passes:
            engine.generate(llm, PROMPTS, max_tokens=1)
        assert all(rows[0] >= 128 and rows[-1] == 1 for rows in passes)
    finally:
        engine.close(llm)
    warnings = [message for level, message in said(log) if level == logging.WARNING]
    assert len(warnings) == 1
    assert "vllm-gaudi 0.99.1" in warnings[0]


def test_newer_release_that_has_drifted_is_refused(e2b, monkeypatch):
    newer(monkeypatch)
    removed(monkeypatch)
    with (
        vllm_log() as log,
        pytest.raises(ValueError, match=f"has no '_form_prefill_batch'.*or drop {FLAG}"),
    ):
        engine.make_llm(e2b, fast=True)
    assert said(log) == []


def test_steps_aside_for_a_plugin_with_fast_prefill_of_its_own(tmp_path, monkeypatch):
    from vllm_gaudi.models.gemma4 import HpuGemma4Model, _hpu_run_decoder_layers

    checkpoint = make_checkpoint(tmp_path)  # of its own: vLLM remembers which class loads a model
    calls = []

    def fast_prefill_forward(self, input_ids, positions, inputs_embeds=None, per_layer_inputs=None, **kwargs):
        calls.append(len(input_ids))
        embeds = self.embed_input_ids(input_ids)
        per_layer_inputs = self.project_per_layer_inputs(embeds, self.get_per_layer_inputs(input_ids))
        return _hpu_run_decoder_layers(self.layers, 0, positions, embeds, per_layer_inputs, **kwargs)

    load_general_plugins()
    patches = importlib.import_module("vllm_gaudi_ext.patches")
    ours = dict(ModelRegistry.models)
    monkeypatch.setattr(HpuGemma4Model, "fast_prefill_forward", fast_prefill_forward, raising=False)
    for architecture in patches.MODELS:
        monkeypatch.setitem(ModelRegistry.models, architecture, ours[architecture])
    theirs = {
        "Gemma4ForConditionalGeneration": "vllm_gaudi.models.gemma4:HpuGemma4ForConditionalGeneration",
        "Gemma4ForCausalLM": "vllm.model_executor.models.gemma4:Gemma4ForCausalLM",
    }
    for architecture, model_class in theirs.items():
        ModelRegistry.register_model(architecture, model_class)
    patches.install()
    assert {ModelRegistry.models[a].module_name for a in theirs} == {m.split(":")[0] for m in theirs.values()}
    with vllm_log() as log:
        llm = engine.make_llm(checkpoint, fast=True)
    try:
        assert engine.text_model_of(llm).fast_prefill_enabled
        engine.generate(llm, PROMPTS, max_tokens=2)
        assert takes_normal_path(llm)
    finally:
        engine.close(llm)
    assert max(calls) >= 200
    ((level, message),) = said(log)
    assert level == logging.INFO
    assert "left to vllm-gaudi" in message


def test_inert_without_kv_sharing_and_plain_without_the_flag(no_kv_sharing, monkeypatch):
    """With the flag off, the plugin may be whatever it is."""
    with monkeypatch.context() as changed:
        renamed(changed)
        another_version(changed)
        with vllm_log() as log:
            llm = engine.make_llm(no_kv_sharing, fast=False)
        expected = engine.generate(llm, PROMPTS)
        engine.close(llm)
    assert said(log) == []

    with vllm_log() as log:
        llm = engine.make_llm(no_kv_sharing, fast=True)
    try:
        assert engine.generate(llm, PROMPTS) == expected
        assert takes_normal_path(llm)
        assert_no_cuda_graph_buffers(llm)
    finally:
        engine.close(llm)
    ((level, message),) = said(log)
    assert level == logging.INFO
    assert "off" in message
    assert "no KV-shared layers" in message


def test_what_does_not_fit_at_all(e2b, monkeypatch):
    """A name that this package imports is gone: said once, refused with the flag, plain without it."""
    import vllm_gaudi.models.gemma4

    load_general_plugins()  # once per process, and as they should be: not under what follows
    patches = importlib.import_module("vllm_gaudi_ext.patches")
    for architecture in patches.MODELS:
        monkeypatch.setitem(MODELS_CONFIG_MAP, architecture, MODELS_CONFIG_MAP.get(architecture))
    monkeypatch.delattr(vllm_gaudi.models.gemma4, "_hpu_run_decoder_layers")
    with vllm_log() as log:
        patches.install()
        patches.install()
    ((level, message),) = said(log)
    assert level == logging.WARNING
    assert FLAG in message
    assert "_hpu_run_decoder_layers" in message
    engine_config(e2b, fast=False)
    with pytest.raises(ValueError) as refusal:
        engine_config(e2b)
    assert "_hpu_run_decoder_layers" in str(refusal.value)
    assert f"or drop {FLAG}" in str(refusal.value)


def test_text_only_needs_flattened_prompts(tmp_path):
    checkpoint = make_checkpoint(tmp_path, architecture="Gemma4ForCausalLM")
    with pytest.raises(ValueError, match=f"{FLAG}.*set VLLM_FLATTEN_INPUT=1"):
        engine.make_llm(checkpoint, fast=True)


# At load: the normal path


def test_merged_prefill_takes_the_normal_path(e2b):
    with vllm_log() as log:
        llm = engine.make_llm(e2b, fast=True, env={"VLLM_MERGED_PREFILL": "true"})
    try:
        assert takes_normal_path(llm)
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
        assert takes_normal_path(llm)
    finally:
        engine.close(llm)
    ((_, message),) = said(log)
    assert kind in message
    assert next(iter(ATTENTION[kind])) in message


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
