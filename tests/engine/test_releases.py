# SPDX-License-Identifier: Apache-2.0
"""At load: releases and drift of what is installed, and a plugin that needs this package no more."""

import importlib
import importlib.metadata
import logging

import pytest
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins

from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.engine import engine_config
from tests.harness.process import said, vllm_log
from tests.harness.record import count_rows, takes_normal_path
from tests.harness.workload import prompts_of

FLAG = "--kv-sharing-fast-prefill"
PROMPTS = prompts_of([5, 200])


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
    return ["vllm_gaudi.v1.worker.hpu_model_runner.HPUModelRunner", "no attribute '_form_prefill_batch'"]


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


def test_without_the_flag_the_plugin_may_be_whatever_it_is(e2b, monkeypatch):
    renamed(monkeypatch)
    another_version(monkeypatch)
    with vllm_log() as log:
        llm = engine.make_llm(e2b, fast=False)
    try:
        assert takes_normal_path(llm, PROMPTS)
    finally:
        engine.close(llm)
    assert said(log) == []


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
        pytest.raises(ValueError, match=f"no attribute '_form_prefill_batch'.*or drop {FLAG}"),
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
        assert takes_normal_path(llm, PROMPTS)
    finally:
        engine.close(llm)
    assert max(calls) >= 200
    ((level, message),) = said(log)
    assert level == logging.INFO
    assert "left to the plugin" in message


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
