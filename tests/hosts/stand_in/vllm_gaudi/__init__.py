# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the parts of vllm-gaudi that vllm-gaudi-ext touches, run by vLLM's real scheduler on a CPU.

For tests and the demo only. Names and behaviour follow the plugin's interface; nothing here is fast.
"""

import torch


def register() -> str:
    from vllm_gaudi.extension.unchecked import wrap_negative_indices

    wrap_negative_indices()
    # vLLM frees an accelerator's memory when an engine ends, on all platforms but its own CPU one.
    torch.accelerator.empty_cache = torch.accelerator.empty_host_cache = lambda: None
    return "vllm_gaudi.platform.HpuPlatform"


def register_utils() -> None:
    """The plugin patches transfer utilities here; the stand-in has none."""


def register_ops() -> None:
    import vllm_gaudi.ops.hpu_attention
    import vllm_gaudi.ops.hpu_rotary_embedding  # noqa: F401


def register_models() -> None:
    from vllm_gaudi.models import register_model

    register_model()
