# SPDX-License-Identifier: Apache-2.0
"""The plugin's feature switches: one namespace per process, from the model and the environment."""

import os
from types import SimpleNamespace

_CONFIG: SimpleNamespace | None = None


def env_flag(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    return default if value is None else value.strip().lower() in ("1", "true", "t", "y", "yes", "on")


def get_config(model_type: str | None = None, prefix_caching: bool = True) -> SimpleNamespace:
    """The switches; the arguments count only for the call that creates them."""
    global _CONFIG
    if _CONFIG is None:
        fused = env_flag("VLLM_PROMPT_USE_FUSEDSDPA", True)
        _CONFIG = SimpleNamespace(
            flatten_input=env_flag("VLLM_FLATTEN_INPUT", model_type == "gemma4"),
            merged_prefill=env_flag("VLLM_MERGED_PREFILL", False),
            use_contiguous_pa=env_flag("VLLM_CONTIGUOUS_PA", not prefix_caching),
            use_bucketing=env_flag("VLLM_ENABLE_BUCKETING", True),
            bucketing_strategy=os.environ.get("VLLM_BUCKETING_STRATEGY", "exp"),
            enable_fsdpa_slicing=False,
            prompt_attn_impl="fsdpa_impl" if fused else "naive_impl",
        )
    return _CONFIG


def clear_config() -> None:
    global _CONFIG
    _CONFIG = None
