# SPDX-License-Identifier: Apache-2.0
"""The module through which an attention layer reaches its cache."""

import torch

from vllm_gaudi.extension.runtime import get_config


class VLLMKVCache(torch.nn.Module):
    _fetch_by_id = False

    def __init__(self, is_v_cache: bool = False) -> None:
        super().__init__()
        self.is_v_cache = is_v_cache
        self.use_contiguous_pa = get_config().use_contiguous_pa

    def forward(
        self,
        input: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        scales: object = None,
        block_size: int | None = None,
        is_prompt: bool = False,
    ) -> torch.Tensor:
        """Write `input` [tokens, kv_heads, head_size] to the flat slots of `cache`."""
        return cache.index_copy_(0, slot_mapping, input)

    def fetch_from_cache(self, cache: torch.Tensor, blocks: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Blocks of `cache` [blocks, block_size, kv_heads, head_size]. Contiguous decode: block i stands at i."""
        if self.use_contiguous_pa and not self._fetch_by_id:
            return cache[: blocks.shape[0]]
        return cache.index_select(0, blocks)
