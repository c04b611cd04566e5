# SPDX-License-Identifier: Apache-2.0
"""``vllm-gaudi-ext check``: its exit code, its reasons, and that they name what to change."""

import importlib.metadata
import json
import sys
from types import SimpleNamespace

import pytest
import vllm.platforms

from tests.harness.process import outcome, start
from vllm_gaudi_ext.__main__ import main

ACTIVE, INACTIVE, DRIFTED = 0, 1, 2


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process: the exit code and what it prints, as JSON and as text."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # which the command sets

    def run():
        monkeypatch.setattr(sys, "argv", ["vllm-gaudi-ext", "check", "--json"])
        code = main()
        answer = json.loads(capsys.readouterr().out)
        monkeypatch.setattr(sys, "argv", ["vllm-gaudi-ext", "check"])
        assert main() == code
        text = capsys.readouterr().out
        assert answer["exit_code"] == code
        assert f"fast prefill: {answer['status']}" in text
        assert all(reason in text for reason in answer["reasons"])
        return code, answer

    return run


def test_active_on_the_host(run):
    code, answer = run()
    assert code == ACTIVE
    assert answer["status"] == "active"
    assert any("--kv-sharing-fast-prefill" in reason for reason in answer["reasons"])
    for distribution in ("vllm", "vllm-gaudi"):
        assert answer["versions"][distribution] == importlib.metadata.version(distribution)


@pytest.mark.parametrize("module, distribution", [("vllm_gaudi", "vllm-gaudi"), ("vllm", "vllm")])
def test_not_installed(run, monkeypatch, module, distribution):
    monkeypatch.setitem(sys.modules, module, None)
    code, answer = run()
    assert code == INACTIVE
    assert answer["reasons"] == [f"{distribution} is not installed"]


@pytest.mark.parametrize("device_name", ["cuda", ""])
def test_another_platform(run, monkeypatch, device_name):
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_name=device_name))
    code, answer = run()
    assert code == INACTIVE
    assert "hpu" in answer["reasons"][0]
    assert (device_name or "none") in answer["reasons"][0]


@pytest.mark.parametrize("distribution, version", [("vllm", "0.25.0"), ("vllm-gaudi", "0.25.1")])
def test_version_that_is_not_supported(run, monkeypatch, distribution, version):
    original = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: version if n == distribution else original(n))
    code, answer = run()
    assert code == INACTIVE
    (reason,) = answer["reasons"]
    assert f"{distribution} {version}" in reason
    assert "0.26" in reason  # the supported range


def test_version_that_was_not_run(run, monkeypatch):
    original = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0.99.0" if n == "vllm-gaudi" else original(n))
    code, answer = run()
    assert code == ACTIVE
    assert any("vllm-gaudi 0.99.0 was not run" in reason for reason in answer["reasons"])


def test_transformers_that_vllm_cannot_load_gemma_4_with(run, monkeypatch):
    original = importlib.metadata.version
    versions = {"vllm": "0.26.0", "transformers": "5.15.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda n: versions.get(n) or original(n))
    code, answer = run()
    assert code == INACTIVE
    (reason,) = answer["reasons"]
    assert "transformers 5.15.0" in reason
    assert "pip install transformers==5.14.1" in reason


def test_plugin_with_fast_prefill_of_its_own(run, monkeypatch):
    from vllm_gaudi.models.gemma4 import HpuGemma4Model

    monkeypatch.setattr(HpuGemma4Model, "fast_prefill_forward", lambda self: None, raising=False)
    code, answer = run()
    assert code == INACTIVE
    assert "brings fast prefill itself" in answer["reasons"][0]


def test_metadata_without_a_field_that_is_read(run, monkeypatch):
    """Drift is judged by what this package depends on, whatever the version says."""
    from vllm_gaudi.v1.attention.backends.hpu_attn import HPUAttentionMetadataV1

    fields = dict(HPUAttentionMetadataV1.__dataclass_fields__)
    del fields["window_block_list"]
    monkeypatch.setattr(HPUAttentionMetadataV1, "__dataclass_fields__", fields)
    code, answer = run()
    assert code == DRIFTED
    assert answer["status"] == "drifted"
    (reason,) = answer["reasons"]
    assert f"{HPUAttentionMetadataV1.__module__}.HPUAttentionMetadataV1" in reason
    assert "window_block_list" in reason


def test_function_without_a_parameter_that_is_passed(run, monkeypatch):
    from vllm_gaudi.attention.backends.hpu_attn import HPUAttentionImpl

    def forward(self, layer, query, key, value, kv_cache, metadata, output=None):
        raise AssertionError

    forward.__module__, forward.__qualname__ = HPUAttentionImpl.__module__, "HPUAttentionImpl.forward"
    monkeypatch.setattr(HPUAttentionImpl, "forward", forward)
    code, answer = run()
    assert code == DRIFTED
    (reason,) = answer["reasons"]
    assert "vllm_gaudi.attention.backends.hpu_attn.HPUAttentionImpl.forward" in reason
    assert "'attn_metadata'" in reason


def test_method_that_is_gone(run, monkeypatch):
    from vllm.model_executor.models.gemma4 import Gemma4Model

    monkeypatch.delattr(Gemma4Model, "project_per_layer_inputs")
    code, answer = run()
    assert code == DRIFTED
    (reason,) = answer["reasons"]
    assert "Gemma4Model.project_per_layer_inputs" in reason


def test_feature_that_is_gone(run, monkeypatch):
    from vllm_gaudi_ext import compat

    monkeypatch.setattr(compat, "FEATURES", f"{compat.FEATURES} long_gone")
    code, answer = run()
    assert code == DRIFTED
    assert answer["reasons"] == ["vllm_gaudi.extension.runtime.get_config has no feature 'long_gone'"]


def test_environment_that_sends_prompts_down_the_normal_path(run, monkeypatch):
    monkeypatch.setenv("QUANT_CONFIG", "quantization.json")
    code, answer = run()
    assert code == INACTIVE
    (reason,) = answer["reasons"]
    assert "QUANT_CONFIG" in reason


def test_class_that_no_longer_sets_an_attribute(run, monkeypatch):
    from vllm_gaudi.ops import hpu_rotary_embedding

    class HPURotaryEmbedding:
        def prepare_cos_sin(self):
            self.cosine, self.sin = None, None

    monkeypatch.setattr(hpu_rotary_embedding, "HPURotaryEmbedding", HPURotaryEmbedding)
    code, answer = run()
    assert code == DRIFTED
    (reason,) = answer["reasons"]
    assert "HPURotaryEmbedding" in reason
    assert "'cos'" in reason


def test_name_that_is_gone(run, monkeypatch):
    import vllm_gaudi.models.gemma4

    monkeypatch.delattr(vllm_gaudi.models.gemma4, "_hpu_run_decoder_layers")
    code, answer = run()
    assert code == DRIFTED
    (reason,) = answer["reasons"]
    assert "vllm_gaudi.models.gemma4" in reason
    assert "_hpu_run_decoder_layers" in reason


def test_module_that_is_gone(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_gaudi.v1.attention.backends.hpu_attn", None)
    code, answer = run()
    assert code == DRIFTED
    assert "vllm_gaudi.v1.attention.backends.hpu_attn" in answer["reasons"][0]


# In processes of their own, as a user has it


@pytest.fixture(scope="module")
def processes():
    """Started together, since most of what each does is import vLLM."""
    command = ("-m", "vllm_gaudi_ext", "check", "--json")
    return {
        "alone": start(*command, VLLM_PLUGINS="hpu,gemma4_fast_prefill", VLLM_LOGGING_LEVEL="INFO"),
        "no platform": start("-c", NO_PLATFORM, VLLM_PLUGINS="gemma4_fast_prefill"),
    }


NO_PLATFORM = """
import contextlib, json, sys
with contextlib.redirect_stdout(sys.stderr):
    from vllm_gaudi_ext.__main__ import check
    code, reasons = check()
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.plugins import load_general_plugins
    load_general_plugins()
modules = [cls.__module__ for cls in MODELS_CONFIG_MAP.values()]
modules += [getattr(model, "module_name", "") for model in ModelRegistry.models.values()]
print(json.dumps([code, reasons, modules, list(sys.modules)]))
"""


def test_prints_one_json_object_where_only_the_platform_and_this_package_are_loaded(processes):
    stdout, stderr = processes["alone"].communicate(timeout=300)
    answer = json.loads(stdout)
    assert answer["status"] == "active", stderr[-2000:]
    assert answer["exit_code"] == processes["alone"].returncode == ACTIVE


def test_does_nothing_without_the_platform(processes):
    """The plugin is installed but not in use, so vLLM runs on another platform."""
    code, reasons, named, imported = outcome(processes["no platform"])
    assert code == INACTIVE
    assert "platform" in reasons[0]
    assert len(named) > 100
    assert not [module for module in named if module.startswith("vllm_gaudi_ext")]
    assert "vllm_gaudi_ext.patches" not in imported


def test_exit_code_without_the_plugin():
    code = "import sys; sys.modules['vllm_gaudi'] = None; sys.argv[0] = 'vllm-gaudi-ext'\n"
    code += "from vllm_gaudi_ext.__main__ import main; sys.exit(main())"
    process = start("-c", code, "check", "--json")
    stdout, _ = process.communicate(timeout=300)
    assert process.returncode == INACTIVE
    assert json.loads(stdout)["reasons"] == ["vllm-gaudi is not installed"]
