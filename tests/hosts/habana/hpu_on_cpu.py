# SPDX-License-Identifier: Apache-2.0
"""Hook that vLLM loads in each of its processes, as a general plugin: equality is judged in float32, so allow it."""

import functools
from typing import Any

import torch


def allow_float32() -> None:
    """Undoes the two settings of the plugin that are in the way of a float32 model."""
    from vllm_gaudi.platform import HpuPlatform
    from vllm_gaudi.v1.worker import hpu_model_runner

    # The runner names its KV cache dtype to vLLM, which knows no cache of that name; "auto" is the model's own dtype.
    hpu_model_runner.HPU_TORCH_DTYPE_TO_STR_DTYPE[torch.float32] = "auto"

    original = HpuPlatform.check_and_update_config
    if hasattr(original, "__wrapped__"):  # loaded twice
        return

    @functools.wraps(original)
    def check_and_update_config(vllm_config: Any) -> None:
        model_config = vllm_config.model_config
        dtype = model_config and model_config.dtype
        original(vllm_config)
        if dtype == torch.float32:
            model_config.dtype = dtype  # which the platform has made bfloat16

    HpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
