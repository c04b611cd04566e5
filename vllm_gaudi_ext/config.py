# SPDX-License-Identifier: Apache-2.0
"""The verdict on an engine's settings: prompts are fast, take the normal path, have nothing to skip, or are refused."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_ext import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FLAG = "--kv-sharing-fast-prefill"


class Fast(NamedTuple):
    """Prompts are fast; and what is reduced beside the KV-shared layers."""
    reduces_kv_producer: bool = True  # the last layer with a KV cache of its own, except for its K/V
    slices_qkv: bool = True  # its K and V are computed without Q, from a slice of the fused weight
    slices_per_layer_inputs: bool = True  # every token's are those of the layers that see it alone


class Normal(NamedTuple):
    """All prompt passes take vllm-gaudi's own way, over every token in every layer."""
    reason: str


class Inert(NamedTuple):
    """There is nothing to skip, or nothing for this package to do."""
    reason: str


class Refused(NamedTuple):
    """The engine must not start with the flag."""
    message: str


Verdict = Fast | Normal | Inert | Refused

LEFT_TO_PLUGIN = Inert("vllm-gaudi brings fast prefill itself, and vllm-gaudi-ext can be uninstalled")


class Setting(NamedTuple):
    """A setting with which prompts cannot be fast."""

    name: str  # as the README has it, and how to set it
    applies: Callable[[Any], object]
    reason: str
    remedy: str | None = None  # with one the setting is refused, without prompts take the normal path

    def verdict(self) -> Verdict:
        if self.remedy is None:
            return Normal(f"{self.reason} ({self.name})")
        return Refused(f"{FLAG} {self.reason} ({self.name}): {self.remedy}, or drop {FLAG}.")


def _is_other_fp8_cache(config: "VllmConfig") -> bool:
    return config.cache_config.cache_dtype.startswith("fp8") and config.cache_config.cache_dtype != "fp8_inc"


def _has_rust_frontend(environment: Any) -> bool:
    from vllm import envs

    return getattr(envs, "VLLM_USE_RUST_FRONTEND", False)


def _is_full_warmup_with_prefix_caching(config: "VllmConfig") -> bool:
    full_warmup = os.environ.get("VLLM_FULL_WARMUP", "").strip().lower() in ("1", "true")
    return full_warmup and config.cache_config.enable_prefix_caching


# Read from the environment alone.
ENVIRONMENT = (
    Setting("VLLM_USE_RUST_FRONTEND", _has_rust_frontend,
            "does not support the Rust frontend, which would accept prompt_logprobs", "unset VLLM_USE_RUST_FRONTEND"),
    Setting("QUANT_CONFIG", lambda environment: environment.get("QUANT_CONFIG"),
            "quantization or calibration with INC is not supported"),
)
# Read from the engine's configuration, which the process that accepts requests has, too.
ENGINE_SETTINGS = (
    Setting("--kv-cache-dtype", _is_other_fp8_cache, "supports no FP8 KV cache but fp8_inc",
            "set --kv-cache-dtype fp8_inc or auto"),
    # A request that resumes from cached blocks after preemption takes the normal path, which full warm-up leaves out,
    # and the plugin then stops at that pass.
    Setting("VLLM_FULL_WARMUP", _is_full_warmup_with_prefix_caching,
            "with prefix caching does not support full warm-up",
            "unset VLLM_FULL_WARMUP, set --no-enable-prefix-caching"),
    Setting("--pipeline-parallel-size", lambda config: config.parallel_config.pipeline_parallel_size > 1,
            "does not support pipeline parallelism", "set --pipeline-parallel-size 1"),
    Setting("--runner pooling", lambda config: config.model_config.pooler_config is not None,
            "a pooling model reads every token"),
    Setting("--kv-transfer-config", lambda config: config.kv_transfer_config is not None,
            "KV connectors are not supported"),
)
# Read from the plugin's runtime configuration, which only the process of the worker has for its model.
PLUGIN_FEATURES = (
    Setting("VLLM_MERGED_PREFILL", lambda features: features.merged_prefill, "merged prefill is not supported"),
    Setting("VLLM_PROMPT_USE_FLEX_ATTENTION", lambda features: features.prompt_attn_impl == "flex_impl",
            "flex attention has no sliding window"),
    # It applies the mask to some slices of the keys alone, so that what a row sees is not what the mask shows.
    Setting("VLLM_HPU_FSDPA_SLICE_ENABLED with VLLM_BUCKETING_STRATEGY=pad",
            lambda features: features.enable_fsdpa_slicing and features.bucketing_strategy == "pad",
            "attention in slices is not supported"),
)
TEXT_ONLY_NEEDS = Setting("VLLM_FLATTEN_INPUT", lambda features: not features.flatten_input,
                          "needs flattened prompts for a text-only Gemma 4", "set VLLM_FLATTEN_INPUT=1")


def decide(vllm_config: "VllmConfig | None" = None, features: Any = None) -> Verdict:
    """What becomes of prompts in an engine with the flag.

    Args:
        vllm_config: the engine's configuration; None if no engine is in question yet.
        features: the plugin's runtime configuration, in a process that has it, where vllm-gaudi is checked for drift,
            too; None in others, as that which accepts requests.
    """
    if compat.plugin_has_fast_prefill():
        return LEFT_TO_PLUGIN
    findings = compat.missing_imports()
    if not findings:
        reason = vllm_config and nothing_to_skip(vllm_config.model_config.hf_text_config)
        if reason:
            return Inert(reason)
        findings = compat.too_old() or ([] if features is None else compat.drift())
    if findings:
        releases = " and ".join(f"{name} {first} to {last}" for name, (first, last) in compat.SUPPORTED.items())
        return Refused(f"{FLAG} needs {releases}: {'; '.join(findings)}. Install those versions, or drop {FLAG}.")
    settings = [setting for setting in ENVIRONMENT if setting.applies(os.environ)]
    if vllm_config:
        settings += [setting for setting in ENGINE_SETTINGS if setting.applies(vllm_config)]
    if features is not None:
        # Which model it is for, the features do not tell before there is one.
        of_plugin = (*PLUGIN_FEATURES, TEXT_ONLY_NEEDS) if vllm_config else PLUGIN_FEATURES
        settings += [setting for setting in of_plugin if setting.applies(features)]
    verdicts = [setting.verdict() for setting in settings] or [_fast(vllm_config)]
    return next((verdict for verdict in verdicts if isinstance(verdict, Refused)), verdicts[0])


def nothing_to_skip(text_config: Any) -> str | None:
    """Why there is nothing to skip in a model of this text config, or None if there is."""
    num_layers, num_shared = text_config.num_hidden_layers, getattr(text_config, "num_kv_shared_layers", 0) or 0
    if num_shared <= 0:
        return "the model has no KV-shared layers"
    if num_shared >= num_layers:
        return "all layers of the model are KV-shared"
    own, shared = (set(text_config.layer_types[:-num_shared]), set(text_config.layer_types[-num_shared:]))
    if not shared <= own:
        return f"no earlier layer owns the KV cache of the KV-shared {', '.join(sorted(shared - own))} layers"
    return None


def _fast(vllm_config: "VllmConfig | None") -> Fast:
    if vllm_config is None:
        return Fast()
    # With an FP8 KV cache the layer attends, in a prompt pass, to its K/V as they were before they were quantized.
    reduces_kv_producer = (os.environ.get("VLLM_GAUDI_EXT_REDUCE_KV_PRODUCER", "1").lower() not in ("0", "false")
                           and vllm_config.cache_config.cache_dtype in ("auto", "bfloat16", "float16"))
    # The rows of the weight of a linear layer are its outputs, unless it is quantized or carries adapters.
    has_plain_weights = vllm_config.quant_config is None and vllm_config.lora_config is None
    return Fast(
        reduces_kv_producer=reduces_kv_producer,
        slices_qkv=has_plain_weights,
        slices_per_layer_inputs=(has_plain_weights and reduces_kv_producer
                                 and vllm_config.parallel_config.tensor_parallel_size == 1),
    )
