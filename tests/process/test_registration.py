# SPDX-License-Identifier: Apache-2.0
"""Registering changes nothing but which model class vLLM finds: in any order, any number of times, and with the flag
off after it was on."""

import dataclasses
import importlib.metadata
import inspect
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.platforms
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins

import vllm_gaudi_ext
from tests.harness import engine
from tests.harness.process import inspect_models_here, outcome, said, start, vllm_log
from tests.harness.workload import prompts_of

OURS = "gemma4_fast_prefill"
PACKAGE = str(Path(vllm_gaudi_ext.__file__).parent)
PLUGIN_MODEL = ("vllm_gaudi.models.gemma4", "HpuGemma4ForConditionalGeneration")
PROMPTS = prompts_of([5, 128, 300])


def general_plugins():
    return [entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")]


def registered():
    models = {name: ModelRegistry.models[name] for name in ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")}
    return {name: (model.module_name, model.class_name) for name, model in models.items()}


def qualified(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def snapshot(llm):
    """All that could tell a model loaded with this package from one loaded without it."""
    model = engine.runner_of(llm).model
    attention = [(layer.self_attn.attn.impl, layer.self_attn.attn.attn_backend) for layer in engine.layers_of(llm)]
    return {
        # The plugin's rotary modules outlive their engine, and gain an attribute in their first pass: run passes first.
        "tokens": engine.generate(llm, PROMPTS),
        "logprobs": logprobs(llm),
        "modules": [[name, qualified(type(module)), sorted(vars(module))] for name, module in model.named_modules()],
        "tensors": [[name, list(t.shape)] for name, t in [*model.named_parameters(), *model.named_buffers()]],
        "impls": [[qualified(type(impl)), sorted(vars(impl))] for impl, _ in attention],
        "backends": [qualified(backend) for _, backend in attention],
    }


def logprobs(llm):
    """Of the first token and its nearest rivals, one list a prompt."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in PROMPTS], params, use_tqdm=False)
    return [sorted(value.logprob for value in output.outputs[0].logprobs[0].values()) for output in outputs]


def function_of(value):
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def replaced():
    """Names in the modules and classes of vllm and vllm-gaudi under which a function of this package is found."""
    names = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] not in ("vllm", "vllm_gaudi") or module is None:
            continue
        for owner in [module, *(value for value in vars(module).values() if inspect.isclass(value))]:
            for name, value in list(vars(owner).items()):
                function = function_of(value)
                if inspect.isfunction(function) and function.__code__.co_filename.startswith(PACKAGE):
                    names.add(f"{owner.__name__}.{name}")
    return sorted(names)


def describe(owner):
    """Each attribute, so that two processes can compare them: functions by where they were defined."""
    attributes = {}
    for name, value in vars(owner).items():
        function = function_of(value)
        where = None
        if inspect.isfunction(function):
            where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        elif inspect.isclass(value) or inspect.ismodule(value):
            where = value.__name__
        attributes[name] = [type(value).__name__, where]
    return attributes


def report(checkpoint):
    """What a fresh process has to say after loading a model without the flag."""
    from vllm.model_executor.models import gemma4, gemma4_mm
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_gaudi_ext.__main__ import check

    inspect_models_here()
    load_general_plugins()
    at_first = registered()
    if at_first["Gemma4ForCausalLM"][0].startswith("vllm_gaudi_ext"):
        vllm_gaudi_ext.register()  # once more, and so has the plugin's own
        from vllm_gaudi import register_models

        register_models()
    result = {"plugins": general_plugins(), "registered": [at_first, registered()], "check": check()}
    llm = engine.make_llm(checkpoint, fast=False)
    from vllm_gaudi.attention.backends.hpu_attn import HPUAttentionImpl
    from vllm_gaudi.models.gemma4 import HpuGemma4ForConditionalGeneration, HpuGemma4Model
    from vllm_gaudi.v1.attention.backends.hpu_attn import HPUAttentionBackendV1, HPUAttentionMetadataV1
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    owners = [gemma4, gemma4_mm, gemma4.Gemma4Model, gemma4.Gemma4ForCausalLM, InputProcessor, HPUModelRunner]
    owners += [HpuGemma4Model, HpuGemma4ForConditionalGeneration]
    owners += [HPUAttentionImpl, HPUAttentionBackendV1, HPUAttentionMetadataV1]
    result["model"] = snapshot(llm)
    engine.close(llm)
    result["attributes"] = {owner.__name__: describe(owner) for owner in owners}
    result["replaced"] = replaced()
    return result


@pytest.fixture(scope="module")
def without_and_with(e2b, tmp_path_factory):
    """Reports of two processes: this package left out through VLLM_PLUGINS, and found before all other plugins."""
    entry_point = next(e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == OURS)
    first = tmp_path_factory.mktemp("first")
    info = first / "vllm_gaudi_ext-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-gaudi-ext\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{entry_point.group}]\n{entry_point.name} = {entry_point.value}\n")
    others = [entry for entry in general_plugins() if entry != OURS]
    code = f"import json; from tests.process.test_registration import report; print(json.dumps(report({str(e2b)!r})))"
    processes = [
        start("-c", code, VLLM_PLUGINS=",".join(["hpu", *others])),
        start("-c", code, VLLM_PLUGINS=None, PYTHONPATH=os.pathsep.join([str(first), os.environ["PYTHONPATH"]])),
    ]
    return [outcome(process) for process in processes]


def test_registered_before_the_plugin_and_again_after_it(without_and_with):
    _, ours = without_and_with
    names = ours["plugins"]
    assert names.index(OURS) < min(i for i, name in enumerate(names) if name.startswith("03."))
    for models in ours["registered"]:
        assert all(module == "vllm_gaudi_ext.models.gemma4" for module, _ in models.values())
    assert ours["check"][0] == 0


def test_left_out_through_vllm_plugins(without_and_with):
    stock, _ = without_and_with
    for models in stock["registered"]:
        assert tuple(models["Gemma4ForConditionalGeneration"]) == PLUGIN_MODEL
        assert models["Gemma4ForCausalLM"][0] == "vllm.model_executor.models.gemma4"
    assert stock["replaced"] == []
    code, reasons = stock["check"]
    assert code == 1
    assert any("VLLM_PLUGINS" in reason for reason in reasons)


@pytest.mark.parametrize("what", ["modules", "tensors", "impls", "backends", "tokens"])
def test_flag_off_loads_the_plugins_own_model(without_and_with, what):
    stock, ours = without_and_with
    assert ours["model"][what] == stock["model"][what]
    assert len(stock["model"][what]) >= len(PROMPTS)
    assert "vllm_gaudi_ext" not in json.dumps(ours["model"][what])


def test_flag_off_gives_the_same_logprobs(without_and_with):
    stock, ours = without_and_with
    for expected, got in zip(stock["model"]["logprobs"], ours["model"]["logprobs"], strict=True):
        assert got == pytest.approx(expected, abs=1e-4)


def test_flag_off_replaces_nothing(without_and_with):
    stock, ours = without_and_with
    assert stock["attributes"].keys() == ours["attributes"].keys()
    for owner, attributes in stock["attributes"].items():
        assert ours["attributes"][owner] == attributes, owner
    assert ours["replaced"] == ["vllm_gaudi.models.register_model"]


def test_registered_after_the_plugin():
    """In this process, where nothing arranges the order, and whatever the plugin does later."""
    import vllm_gaudi

    load_general_plugins()
    for _ in range(2):
        vllm_gaudi.register_models()
        assert {module for module, _ in registered().values()} == {"vllm_gaudi_ext.models.gemma4"}
        vllm_gaudi_ext.register()
        assert {module for module, _ in registered().values()} == {"vllm_gaudi_ext.models.gemma4"}
    assert registered()["Gemma4ForConditionalGeneration"][1] != registered()["Gemma4ForCausalLM"][1]


@pytest.fixture
def registry(monkeypatch):
    """The tables that registering writes to, filled with something else."""
    for name in registered():
        monkeypatch.setitem(ModelRegistry.models, name, SimpleNamespace(module_name="other", class_name="Other"))
        monkeypatch.setitem(MODELS_CONFIG_MAP, name, "other")

    def written():
        return [module for module, _ in registered().values()] + [MODELS_CONFIG_MAP[name] for name in registered()]

    vllm_gaudi_ext.register()
    assert "other" not in written()
    for name in registered():
        ModelRegistry.models[name] = SimpleNamespace(module_name="other", class_name="Other")
        MODELS_CONFIG_MAP[name] = "other"
    return written


def test_does_nothing_without_the_plugin(registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_gaudi", None)  # as importlib sees a package that is not installed
    vllm_gaudi_ext.register()
    assert set(registry()) == {"other"}


@pytest.mark.parametrize("device_name", ["cpu", "cuda", ""])
def test_does_nothing_on_another_platform(registry, monkeypatch, device_name):
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_name=device_name))
    vllm_gaudi_ext.register()
    assert set(registry()) == {"other"}


def test_does_nothing_where_vllm_has_changed(registry, monkeypatch):
    """A name that the hooks need is gone: vLLM runs as without this package, and says so once."""
    monkeypatch.delitem(sys.modules, "vllm_gaudi_ext.patches")
    monkeypatch.delattr("vllm.model_executor.models.config.Gemma4Config")
    with vllm_log() as log:
        vllm_gaudi_ext.register()
    assert set(registry()) == {"other"}
    ((level, message),) = said(log)
    assert level == logging.WARNING
    assert "Gemma4Config" in message


def test_flag_off_after_flag_on_is_as_without_the_package(e2b, without_and_with, monkeypatch):
    inspect_models_here(monkeypatch.setattr)
    stock, _ = without_and_with
    with vllm_log() as log:
        fast = engine.make_llm(e2b, fast=True)
    shared = [i for i, layer in enumerate(engine.layers_of(fast)) if layer.self_attn.is_kv_shared_layer]
    on = snapshot(fast)
    engine.close(fast)
    ((level, message),) = said(log)
    assert level == logging.INFO
    assert f"Fast prefill is on: layers {shared[0]}-{shared[-1]}," in message

    with vllm_log() as log:
        llm = engine.make_llm(e2b, fast=False)
    read_at_two_rows = prompts_read_at_two_rows(llm, monkeypatch)
    off = snapshot(llm)
    engine.close(llm)
    assert said(log) == []
    assert on["tokens"] == stock["model"]["tokens"]
    assert on["impls"] != stock["model"]["impls"]
    # Weight loaders and quantizers find each layer once, under the name that it has without the flag.
    assert json.loads(json.dumps(on["tensors"])) == stock["model"]["tensors"]
    names = [{name for name, *_ in modules} for modules in (on["modules"], stock["model"]["modules"])]
    assert {name.rpartition(".regions")[2] for name in names[0] - names[1]} == {"", ".0", ".1"}
    assert names[1] < names[0]
    for what in ("modules", "tensors", "impls", "backends", "tokens"):
        assert json.loads(json.dumps(off[what])) == stock["model"][what], what
    for expected, got in zip(stock["model"]["logprobs"], off["logprobs"], strict=True):
        assert got == pytest.approx(expected, abs=1e-4)
    assert len(read_at_two_rows) > 0
    assert all(metadata.prep_initial_states is None for metadata in read_at_two_rows)


def prompts_read_at_two_rows(llm, monkeypatch):
    """Metadata of each prompt pass from now on, as it would be if the runner also read a prompt's first row."""
    runner = type(engine.runner_of(llm))
    form_prefill_batch = runner._form_prefill_batch
    formed = []

    def form_twice(self, contents):
        positions = [[0, *last] for last in contents.logits_positions]
        formed.extend(form_prefill_batch(self, dataclasses.replace(contents, logits_positions=positions)).attn_metadata)
        return form_prefill_batch(self, contents)

    monkeypatch.setattr(runner, "_form_prefill_batch", form_twice)
    return formed


def test_another_architecture_after_flag_on(tmp_path, monkeypatch):
    """Llama, in a process in which an engine had the flag: as transformers has it."""
    inspect_models_here(monkeypatch.setattr)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.5,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    llm = engine.make_llm(tmp_path, fast=False, skip_tokenizer_init=True, limit_mm_per_prompt=None)
    got = engine.generate(llm, PROMPTS, detokenize=False)
    engine.close(llm)
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert tokens == expected[0, len(prompt) :].tolist()
