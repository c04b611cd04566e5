# SPDX-License-Identifier: Apache-2.0
"""Whether what is installed is what this package was written for: releases, and all that it takes from them.

Of no use once the code is part of vllm-gaudi.
"""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

# The releases that are supported: first, and last. The README says which of them were run.
SUPPORTED = {"vllm": ("0.26", "0.30"), "vllm-gaudi": ("0.26", "0.30")}

GEMMA4 = "vllm.model_executor.models.gemma4"
HPU_GEMMA4 = "vllm_gaudi.models.gemma4"
HPU_ATTN = "vllm_gaudi.attention.backends.hpu_attn"
HPU_ATTN_V1 = "vllm_gaudi.v1.attention.backends.hpu_attn"
RUNNER = "vllm_gaudi.v1.worker.hpu_model_runner"
HPU_OPS, HPU_UTILS = "vllm_gaudi.extension.ops", "vllm_gaudi.extension.utils"

# Functions that this package calls, overrides or wraps, and the parameters that it names or counts on.
PARAMETERS = {
    f"{HPU_GEMMA4}:HpuGemma4Model.forward": "input_ids positions intermediate_tensors inputs_embeds per_layer_inputs",
    f"{HPU_GEMMA4}:_hpu_run_decoder_layers": "decoder_layers positions hidden_states per_layer_inputs",
    f"{HPU_GEMMA4}:_apply_hpu_gemma4_patches": "language_model",
    f"{GEMMA4}:Gemma4DecoderLayer.forward": "positions hidden_states residual per_layer_input",
    f"{GEMMA4}:Gemma4Model.embed_input_ids": "input_ids",
    f"{GEMMA4}:Gemma4Model.get_per_layer_inputs": "input_ids",
    f"{GEMMA4}:Gemma4Model.project_per_layer_inputs": "inputs_embeds per_layer_inputs",
    f"{HPU_ATTN}:HPUAttentionImpl.forward": "layer query key value kv_cache attn_metadata output",
    f"{HPU_ATTN}:_set_fetch_by_id": "kv_cache value",
    f"{HPU_ATTN_V1}:HPUAttentionBackendV1.get_impl_cls": "",
    f"{HPU_UTILS}:VLLMKVCache.forward": "input cache slot_mapping scales block_size is_prompt",
    f"{HPU_UTILS}:VLLMKVCache.fetch_from_cache": "cache blocks",
    f"{HPU_OPS}:LoraMask.getLoraMask": "",
    f"{HPU_OPS}:LoraMask.setLoraMask": "mask",
    f"{RUNNER}:HPUModelRunner._form_prefill_batch": "contents",
    "vllm.v1.engine.input_processor:InputProcessor._validate_params": "params",
}
# Fields of dataclasses that it reads or sets.
FIELDS = {
    f"{RUNNER}:BatchContents": "logits_positions",
    "vllm.forward_context:ForwardContext": "attn_metadata",
    f"{HPU_ATTN_V1}:HPUAttentionMetadataV1": ("is_prompt seq_lens_tensor slot_mapping block_size prep_initial_states "
                                              "block_list attn_bias window_block_list window_attn_bias"),
}  # yapf: disable
# Attributes of instances that it reads or sets.
ATTRIBUTES = {
    f"{GEMMA4}:Gemma4Model": ("layers norm fast_prefill_enabled hidden_size_per_layer_input embed_tokens_per_layer "
                              "vocab_size_per_layer_input embed_scale_per_layer per_layer_model_projection "
                              "per_layer_projection_scale per_layer_projection_norm per_layer_input_scale"),
    f"{GEMMA4}:Gemma4DecoderLayer": "self_attn input_layernorm",
    f"{GEMMA4}:Gemma4Attention": "qkv_proj k_norm v_norm rotary_emb attn q_size num_kv_heads head_dim",
    f"{HPU_ATTN}:HPUAttentionImpl": ("num_heads num_kv_heads head_size scale sliding_window "
                                     "kv_sharing_target_layer_name k_cache v_cache"),
    "vllm_gaudi.ops.hpu_rotary_embedding:HPURotaryEmbedding": "cos sin",
}  # yapf: disable
# Features of the plugin's runtime configuration that it reads.
FEATURES = "flatten_input merged_prefill prompt_attn_impl enable_fsdpa_slicing bucketing_strategy"


def _releases() -> Iterator[tuple[str, Version]]:
    """The distributions of ``SUPPORTED`` with their versions.

    A build without a release version, such as a checkout, has nothing to compare and is judged by ``drift`` alone.
    """
    for distribution in SUPPORTED:
        try:
            version = Version(importlib.metadata.version(distribution))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            continue
        if version.release >= (0, 2):  # setuptools-scm calls a checkout without tags 0.1.dev1 or the like
            yield distribution, version


def too_old() -> list[str]:
    """Which of vllm and vllm-gaudi is a release before the first that is supported."""
    return [
        f"{name} {version} is older than {SUPPORTED[name][0]}" for name, version in _releases()
        if Version(version.base_version) < Version(SUPPORTED[name][0])
    ]


def not_run() -> list[str]:
    """Which of vllm and vllm-gaudi is a release after the last that is supported."""
    return [
        f"{name} {version}" for name, version in _releases()
        if version.release[:2] > Version(SUPPORTED[name][1]).release
    ]


def transformers_misfit() -> str | None:
    """What to install where vllm cannot load Gemma 4 with this transformers, with the flag or without; else None."""
    installed = dict(_releases())
    try:
        transformers = Version(importlib.metadata.version("transformers"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None
    # From 5.15 on the configuration of Gemma 4 has head sizes by layer type, which vllm reads from 0.28 on.
    if "vllm" in installed and installed["vllm"].release < (0, 28) and transformers.release >= (5, 15):
        return (f"vllm {installed['vllm']} cannot load Gemma 4 with transformers {transformers}: "
                "pip install transformers==5.14.1")
    return None


def plugin_has_fast_prefill() -> bool:
    """Whether vllm-gaudi brings fast prefill of its own, so that this package is not needed."""
    try:
        return "fast_prefill_forward" in vars(importlib.import_module(HPU_GEMMA4).HpuGemma4Model)
    except Exception:  # whatever importing raises: missing_imports will say
        return False


def missing_imports() -> list[str]:
    """Which names that modules of this package import are not there; empty if none."""
    return [*_each(_imports(), lambda module: lambda name: hasattr(module, name), "no {!r}")]


def drift() -> list[str]:
    """Where the installed vllm and vllm-gaudi differ from what this package relies on; empty if nowhere."""
    return missing_imports() or [
        *_each(PARAMETERS, lambda function: inspect.signature(function).parameters.__contains__, "no parameter {!r}"),
        *_each(FIELDS, lambda cls: [field.name for field in dataclasses.fields(cls)].__contains__, "no field {!r}"),
        *_each(ATTRIBUTES, _assigns, "no code that sets {!r}"),
        *_each({"vllm_gaudi.extension.runtime:get_config": FEATURES}, _has_feature, "no feature {!r}"),
    ]


def _imports() -> dict[str, str]:
    """The names that modules of this package import from vllm and vllm-gaudi, by "module:"."""
    imports: dict[str, str] = {}
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith(("vllm.", "vllm_gaudi.")):
                names = [imports.get(f"{node.module}:", ""), *(alias.name for alias in node.names)]
                imports[f"{node.module}:"] = " ".join(names)
    return imports


def _each(table: dict[str, str], contains: Callable[[Any], Callable[[str], bool]], finding: str) -> Iterator[str]:
    """A finding for each "module:object" in the table that is not there, and for each name that it does not contain."""
    for path, names in table.items():
        where = path.replace(":", ".").rstrip(".")
        try:
            has = contains(pkgutil.resolve_name(path))
        except Exception as error:  # whatever importing raises, too
            yield f"{where}: {error}"
        else:
            yield from (f"{where} has {finding.format(name)}" for name in dict.fromkeys(names.split()) if not has(name))


def _assigns(cls: type) -> Callable[[str], bool]:
    source = "\n".join(
        inspect.getsource(base) for base in cls.__mro__ if base.__module__.split(".")[0] not in ("torch", "builtins"))
    targets = r'^\s*(?:[\w.]+\s*,\s*)*self\.{0}\b\s*(?:,\s*[\w.]+\s*)*(?::[^=\n]*)?=(?!=)|register_buffer\(\s*"{0}"'
    return lambda name: re.search(targets.format(name), source, re.MULTILINE) is not None


def _has_feature(get_config: Callable[[], Any]) -> Callable[[str], bool]:

    def has(name: str) -> bool:
        try:
            getattr(get_config(), name)
        except (AssertionError, AttributeError):
            return False
        return True

    return has
