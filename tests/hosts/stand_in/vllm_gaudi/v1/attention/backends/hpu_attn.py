# SPDX-License-Identifier: Apache-2.0
"""The backend vLLM selects, and the metadata of one pass before it is trimmed."""

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_gaudi.attention.backends.hpu_attn import HPUAttentionImpl


@dataclass
class HPUAttentionMetadataV1:
    """One pass: prompts only ([bs, seq]) or decodes only ([bs, 1]).

    Prompts use the first group, decodes the last two, with one entry per block of any row.
    """

    is_prompt: bool
    block_size: int
    slot_mapping: torch.Tensor  # [bs, seq] int64, padding -1 (prompts) or in the pad block (decodes)

    seq_lens_tensor: torch.Tensor | None = None  # [bs] int32, this pass's query lengths, padding rows 0
    context_lens_tensor: torch.Tensor | None = None  # [bs] int32
    prep_initial_states: bool | None = None  # of mamba layers, which Gemma 4 has none of

    block_list: torch.Tensor | None = None  # prompts: int32, only with context; decodes: [n] int64
    block_mapping: torch.Tensor | None = None  # [n, bs], one-hot rows, padding rows zero
    block_groups: torch.Tensor | None = None  # [n], row of the block, padding: bs
    block_usage: torch.Tensor | None = None  # [n], tokens used in the block
    attn_bias: torch.Tensor | None = None  # prompts: [bs, 1, seq, context + seq]; decodes: [n, block_size]

    window_block_list: torch.Tensor | None = None
    window_block_mapping: torch.Tensor | None = None
    window_block_groups: torch.Tensor | None = None
    window_block_usage: torch.Tensor | None = None
    window_attn_bias: torch.Tensor | None = None


@register_backend(AttentionBackendEnum.CUSTOM, "HPU_ATTN_V1")
class HPUAttentionBackendV1(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HPUAttentionImpl]:
        return HPUAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[HPUAttentionMetadataV1]:
        return HPUAttentionMetadataV1

    @staticmethod
    def get_builder_cls() -> None:
        raise NotImplementedError("the runner builds the metadata")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks * block_size, num_kv_heads, head_size)

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [128]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return 128
