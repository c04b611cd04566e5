# SPDX-License-Identifier: Apache-2.0
"""The verdict on an engine's settings, and that the README's table says the same."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_gaudi_ext import compat, config
from vllm_gaudi_ext.config import FLAG, Fast, Inert, Normal, Refused, decide, nothing_to_skip

SLIDING, FULL = "sliding_attention", "full_attention"
README = (Path(__file__).parents[2] / "README.md").read_text()


def text_config(layer_types, num_kv_shared_layers):
    return SimpleNamespace(
        num_hidden_layers=len(layer_types), num_kv_shared_layers=num_kv_shared_layers, layer_types=layer_types
    )


def engine_config(**changes):
    """What is read of a VllmConfig; `part__field=value` changes a field."""
    parts = {
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
        "parallel_config": {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "data_parallel_size": 1},
        "model_config": {"pooler_config": None, "hf_text_config": text_config([SLIDING, FULL, SLIDING, FULL], 2)},
    }
    whole = {"kv_transfer_config": None, "lora_config": None, "quant_config": None, "speculative_config": None}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        (parts[part] if field else whole)[field or name] = value
    return SimpleNamespace(**whole, **{name: SimpleNamespace(**fields) for name, fields in parts.items()})


def plugin_features(**changes):
    """The plugin's features that are read, as it has them for Gemma 4 by default."""
    defaults = {"flatten_input": True, "merged_prefill": False, "prompt_attn_impl": "fsdpa_impl"}
    return SimpleNamespace(**defaults | {"enable_fsdpa_slicing": False, "bucketing_strategy": "exp"} | changes)


@pytest.fixture(autouse=True)
def _installed_as_needed(monkeypatch):
    monkeypatch.setattr(compat, "plugin_has_fast_prefill", lambda: False)
    for function in ("too_old", "missing_imports", "drift"):
        monkeypatch.setattr(compat, function, lambda: [])
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)))
    for name in ("VLLM_FULL_WARMUP", "QUANT_CONFIG", "VLLM_GAUDI_EXT_REDUCE_KV_PRODUCER"):
        monkeypatch.delenv(name, raising=False)


def test_reasons_to_skip_nothing():
    assert nothing_to_skip(text_config([SLIDING, FULL, SLIDING, FULL], 2)) is None
    assert "no KV-shared layers" in nothing_to_skip(text_config([SLIDING, FULL], 0))
    assert "no KV-shared layers" in nothing_to_skip(text_config([SLIDING, FULL], None))
    assert "all layers" in nothing_to_skip(text_config([SLIDING, FULL], 2))
    assert FULL in nothing_to_skip(text_config([SLIDING, SLIDING, SLIDING, FULL], 2))
    assert SLIDING in nothing_to_skip(text_config([FULL, FULL, SLIDING, FULL], 2))
    assert "no KV-shared layers" in nothing_to_skip(SimpleNamespace(num_hidden_layers=2, layer_types=[FULL, FULL]))


# Of each setting in the tables: the environment, the engine's configuration, the plugin's features.
WITH = {
    "--kv-cache-dtype": ({}, {"cache_config__cache_dtype": "fp8"}, {}),
    "VLLM_USE_RUST_FRONTEND": ({}, {}, {}),
    "VLLM_FULL_WARMUP": ({"VLLM_FULL_WARMUP": "true"}, {}, {}),
    "--pipeline-parallel-size": ({}, {"parallel_config__pipeline_parallel_size": 2}, {}),
    "--runner pooling": ({}, {"model_config__pooler_config": object()}, {}),
    "--kv-transfer-config": ({}, {"kv_transfer_config": object()}, {}),
    "VLLM_MERGED_PREFILL": ({}, {}, {"merged_prefill": True}),
    "VLLM_PROMPT_USE_FLEX_ATTENTION": ({}, {}, {"prompt_attn_impl": "flex_impl"}),
    "VLLM_HPU_FSDPA_SLICE_ENABLED with VLLM_BUCKETING_STRATEGY=pad": (
        {},
        {},
        {"enable_fsdpa_slicing": True, "bucketing_strategy": "pad"},
    ),
    "QUANT_CONFIG": ({"QUANT_CONFIG": "quantization.json"}, {}, {}),
    "VLLM_FLATTEN_INPUT": ({}, {}, {"flatten_input": False}),
}
REFUSED = {
    *("--kv-cache-dtype", "VLLM_USE_RUST_FRONTEND", "VLLM_FULL_WARMUP", "--pipeline-parallel-size"),
    "VLLM_FLATTEN_INPUT",
}


def verdict_with(name, monkeypatch):
    environment, changes, features = WITH[name]  # of vLLM's own variables, vLLM tells
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys.modules["vllm"].envs, "VLLM_USE_RUST_FRONTEND", name == "VLLM_USE_RUST_FRONTEND")
    return decide(engine_config(**changes), plugin_features(**features))


def all_settings():
    return [*config.ENVIRONMENT, *config.ENGINE_SETTINGS, *config.PLUGIN_FEATURES, config.TEXT_ONLY_NEEDS]


@pytest.mark.parametrize("name", WITH)
def test_each_setting_that_cannot_be_fast(name, monkeypatch):
    assert {setting.name for setting in all_settings()} == WITH.keys()
    verdict = verdict_with(name, monkeypatch)
    if name in REFUSED:
        assert isinstance(verdict, Refused)
        assert name in verdict.message
        assert verdict.message.endswith(f"or drop {FLAG}.")
    else:
        assert isinstance(verdict, Normal)
        assert name in verdict.reason


def test_installation_comes_first_then_the_model_then_what_is_refused(monkeypatch):
    no_sharing = {"model_config__hf_text_config": text_config([SLIDING, FULL], 0)}
    pipeline, connector = {"parallel_config__pipeline_parallel_size": 2}, {"kv_transfer_config": object()}
    assert isinstance(decide(engine_config(**connector)), Normal)
    assert isinstance(decide(engine_config(**connector, **pipeline)), Refused)
    assert isinstance(decide(engine_config(**connector, **pipeline, **no_sharing)), Inert)
    monkeypatch.setattr(compat, "drift", lambda: ["method has no parameter"])
    assert isinstance(decide(engine_config()), Fast)  # the process that accepts requests does not load the runner
    assert "method has no parameter" in decide(engine_config(), plugin_features()).message
    assert isinstance(decide(engine_config(**no_sharing), plugin_features()), Inert)
    monkeypatch.setattr(compat, "too_old", lambda: ["vllm 0.25 is older"])
    assert "vllm 0.25 is older" in decide(engine_config()).message
    monkeypatch.setattr(compat, "missing_imports", lambda: ["module has no 'name'"])
    assert "module has no 'name'" in decide(engine_config(**no_sharing)).message
    monkeypatch.setattr(compat, "plugin_has_fast_prefill", lambda: True)
    assert "brings fast prefill itself" in decide(engine_config(**no_sharing)).reason


def test_without_a_model():
    """As `check` asks."""
    assert decide(features=plugin_features(flatten_input=False)) == Fast()


@pytest.mark.parametrize("changes, expected", [
    ({"quant_config": object()}, Fast(True, False, False)),
    ({"cache_config__cache_dtype": "bfloat16"}, Fast(True, True, True)),
])  # fmt: skip
def test_what_is_reduced(changes, expected):
    assert decide(engine_config(**changes), plugin_features()) == expected


@pytest.mark.parametrize("value", ["0", "false"])
def test_kv_producer_on_every_token(value, monkeypatch):
    monkeypatch.setenv("VLLM_GAUDI_EXT_REDUCE_KV_PRODUCER", value)
    assert decide(engine_config(), plugin_features()) == Fast(False, True, False)


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_full_warmup_is_refused_with_prefix_caching_alone(value, monkeypatch):
    monkeypatch.setenv("VLLM_FULL_WARMUP", value)
    assert isinstance(decide(engine_config()), Refused)
    assert isinstance(decide(engine_config(cache_config__enable_prefix_caching=False)), Fast)


# The rows of the README's table that say "fast", by a word of theirs, and what is computed for all tokens nevertheless.
FAST = {
    "prefix caching": ({}, Fast(True, True, True)),
    "multimodal input": ({}, Fast(True, True, True)),
    "LoRA": ({"lora_config": object()}, Fast(True, False, False)),
    "tensor and data parallelism": (
        {"parallel_config__tensor_parallel_size": 2, "parallel_config__data_parallel_size": 2},
        Fast(True, True, False),
    ),
    "fp8_inc": ({"cache_config__cache_dtype": "fp8_inc"}, Fast(False, True, False)),
    "drafting": ({"speculative_config": object()}, Fast(True, True, True)),
    "Gemma4ForCausalLM": ({}, Fast(True, True, True)),
}


@pytest.mark.parametrize("word", FAST)
def test_what_the_readme_calls_fast(word):
    changes, expected = FAST[word]
    assert decide(engine_config(**changes), plugin_features()) == expected
    assert len([what for what, verdict in readme_table() if word in what and verdict.startswith("fast")]) == 1


def readme_table():
    section = README.split("## What is supported")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert len(rows) > 8
    return rows


def test_the_readme_names_each_setting_with_its_verdict():
    rows = readme_table()
    for setting in all_settings():
        variables = re.findall(r"[A-Z_]{6,}|--[a-z-]+", setting.name)
        says = [verdict for what, verdict in rows if all(variable in what + verdict for variable in variables)]
        expected = "normal path" if setting.remedy is None else "refused at start"
        if setting is config.TEXT_ONLY_NEEDS:
            expected = "fast; vllm-gaudi needs"
        # One KV cache dtype is fast, as its row says, and the others are not.
        says = [verdict for verdict in says if setting.name != "--kv-cache-dtype" or not verdict.startswith("fast")]
        assert [verdict.startswith(expected) for verdict in says] == [True], setting.name


def test_the_readme_calls_nothing_fast_that_is_not_tried_here():
    fast = [what for what, verdict in readme_table() if verdict.startswith("fast")]
    assert len(fast) == sum(any(word in what for word in FAST) for what in fast)
