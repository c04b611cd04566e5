# SPDX-License-Identifier: Apache-2.0
"""The platform vLLM sees: named `hpu`, with the CPU as its device, as the plugin has it in its fake-device mode."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig

from vllm_gaudi.extension.runtime import env_flag

BLOCK_SIZE = 128


class HpuPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = "hpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "HABANA_VISIBLE_MODULES"
    simple_compile_backend = "eager"
    # float32 first: it is what equality of tokens needs.
    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        return "vllm_gaudi.v1.attention.backends.hpu_attn.HPUAttentionBackendV1"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        # A forked worker inherits the threads torch has started.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm_gaudi.v1.worker.hpu_worker.HPUWorker"
        if not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = BLOCK_SIZE
        if env_flag("VLLM_CONTIGUOUS_PA", False):
            vllm_config.cache_config.enable_prefix_caching = False
        vllm_config.compilation_config.custom_ops = ["all"]
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        vllm_config.compilation_config.cudagraph_capture_sizes = []
        vllm_config.compilation_config.mode = CompilationMode.NONE

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 0

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def is_async_output_supported(cls, enforce_eager: bool | None) -> bool:
        return True

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def is_kv_cache_dtype_supported(cls, kv_cache_dtype: str, model_config: Any) -> bool:
        return kv_cache_dtype == "fp8_inc"

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def import_kernels(cls) -> None:
        pass
