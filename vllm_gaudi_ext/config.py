# SPDX-License-Identifier: Apache-2.0
"""What the engine's settings mean for fast prefill: nothing to skip, refused, or the normal path."""

import importlib.metadata
import os
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from vllm import envs
from vllm.config import VllmConfig

FLAG = "--kv-sharing-fast-prefill"
SUPPORTED = {"vllm": ">=0.26,<0.31", "vllm-gaudi": ">=0.26,<0.28"}  # releases; the README says which were run


def misfit_error(reason: str) -> ValueError:
    """The refusal of the flag where this package does not fit what is installed, for the given reason."""
    releases = " and ".join(f"{name} {supported}" for name, supported in SUPPORTED.items())
    return ValueError(f"{FLAG} needs {releases}: {reason}. Install those versions, or drop {FLAG}.")


def out_of_range() -> list[str]:
    """Which of vllm and vllm-gaudi is a release outside the range that this package supports.

    A build without a release version, such as a checkout, has nothing to compare and is judged by ``drift`` alone.
    """
    findings = []
    for distribution, specifier in SUPPORTED.items():
        supported = SpecifierSet(specifier)
        try:
            version = Version(importlib.metadata.version(distribution))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            continue
        # setuptools-scm calls a checkout without tags 0.1.dev1 or the like.
        is_checkout = version.release < (0, 2)
        if not is_checkout and not supported.contains(version.base_version):
            findings.append(f"{distribution} {version} is outside the supported range {supported}")
    return findings


def inert_reason(text_config: Any) -> str | None:
    """Why there is nothing to skip in a model of this text config, or None if there is."""
    num_layers, num_shared = text_config.num_hidden_layers, getattr(text_config, "num_kv_shared_layers", 0) or 0
    if num_shared <= 0:
        return "the model has no KV-shared layers"
    if num_shared >= num_layers:
        return "all layers of the model are KV-shared"
    first = num_layers - num_shared
    own, shared = set(text_config.layer_types[:first]), set(text_config.layer_types[first:])
    if not shared <= own:
        return f"no earlier layer owns the KV cache of the KV-shared {', '.join(sorted(shared - own))} layers"
    return None


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Refuse the settings of the engine that fast prefill would turn into wrong results.

    Raises:
        ValueError: naming the setting to change.
    """
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype.startswith("fp8") and cache_dtype != "fp8_inc":
        raise ValueError(
            f"{FLAG} supports no FP8 KV cache but fp8_inc, not --kv-cache-dtype {cache_dtype}: "
            f"set --kv-cache-dtype fp8_inc or auto, or drop {FLAG}."
        )
    if getattr(envs, "VLLM_USE_RUST_FRONTEND", False):
        raise ValueError(
            f"{FLAG} does not support the Rust frontend, which would accept prompt_logprobs: "
            f"unset VLLM_USE_RUST_FRONTEND, or drop {FLAG}."
        )
    full_warmup = os.environ.get("VLLM_FULL_WARMUP", "").strip().lower() in ("1", "true")
    if full_warmup and vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            f"{FLAG} with prefix caching does not support VLLM_FULL_WARMUP: a request that resumes from cached blocks "
            f"after preemption takes the normal path, which is not warmed up. Unset VLLM_FULL_WARMUP, set "
            f"--no-enable-prefix-caching, or drop {FLAG}."
        )
    pipeline_parallel_size = vllm_config.parallel_config.pipeline_parallel_size
    if pipeline_parallel_size > 1:
        raise ValueError(
            f"{FLAG} does not support pipeline parallelism (--pipeline-parallel-size {pipeline_parallel_size}): "
            f"set --pipeline-parallel-size 1, or drop {FLAG}."
        )


def check_at_load() -> None:
    """Check, in the process that loads the model, what only that process can know.

    Raises:
        ValueError: if vllm or vllm-gaudi is not what this package supports, or if the plugin does not flatten the
            prompt tokens.
    """
    from vllm_gaudi_ext.hpu import drift, get_config

    findings = out_of_range() or drift()
    if findings:
        raise misfit_error("; ".join(findings))
    if not get_config().flatten_input:
        raise ValueError(f"{FLAG} needs flattened prompts for a text-only Gemma 4: set VLLM_FLATTEN_INPUT=1.")


def environment_reason() -> str | None:
    """Why all prompt passes take the normal path under this process' environment, or None if they may be fast."""
    from vllm_gaudi_ext.hpu import get_config

    features = get_config()
    if features.merged_prefill:
        return "merged prefill (VLLM_MERGED_PREFILL) is not supported"
    if features.prompt_attn_impl == "flex_impl":
        return "flex attention (VLLM_PROMPT_USE_FLEX_ATTENTION) has no sliding window"
    if features.enable_fsdpa_slicing and features.bucketing_strategy == "pad":
        # It applies the mask to some slices of the keys alone, so that what a row sees is not what the mask shows.
        return "attention in slices (VLLM_HPU_FSDPA_SLICE_ENABLED, with VLLM_BUCKETING_STRATEGY=pad) is not supported"
    if os.environ.get("QUANT_CONFIG"):
        return "quantization or calibration with INC (QUANT_CONFIG) is not supported"
    return None


def normal_path_reason(vllm_config: VllmConfig) -> str | None:
    """Why all prompt passes take the normal path under these settings, or None if they may be fast."""
    if vllm_config.model_config.pooler_config is not None:
        return "a pooling model reads every token"
    if vllm_config.kv_transfer_config is not None:
        return "KV connectors (--kv-transfer-config) are not supported"
    return environment_reason()


def reduces_kv_producer(vllm_config: VllmConfig) -> bool:
    """Whether the last layer with a KV cache of its own, too, runs on last tokens, except for its K/V.

    Not with an FP8 KV cache: in a prompt pass that layer attends to its K/V as they were before they were quantized.
    """
    if os.environ.get("VLLM_GAUDI_EXT_REDUCE_KV_PRODUCER", "1").lower() in ("0", "false"):
        return False
    return vllm_config.cache_config.cache_dtype in ("auto", "bfloat16", "float16")


def takes_weight_rows(vllm_config: VllmConfig) -> bool:
    """Whether the output rows of a linear layer can be had alone: not if it is quantized or carries adapters."""
    return vllm_config.quant_config is None and vllm_config.lora_config is None
