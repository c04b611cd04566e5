# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer, in plain torch."""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_gaudi.extension.runtime import get_config
from vllm_gaudi.extension.utils import VLLMKVCache


def _set_fetch_by_id(kv_cache: VLLMKVCache, value: bool) -> None:
    kv_cache._fetch_by_id = value


class HPUAttentionImpl(AttentionImpl, torch.nn.Module):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        assert alibi_slopes is None and not logits_soft_cap and attn_type == AttentionType.DECODER
        if kv_cache_dtype != "auto":
            raise NotImplementedError(f"the stand-in has no {kv_cache_dtype} KV cache")
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.prefill_impl = get_config().prompt_attn_impl
        self.use_contiguous_pa = get_config().use_contiguous_pa
        self.use_merged_prefill = get_config().merged_prefill
        self.k_cache = VLLMKVCache()
        self.v_cache = VLLMKVCache(is_v_cache=True)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: tuple[Any, ...],
        attn_metadata: Any,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [tokens, heads * head_size] (or [bs, seq, ...]) -> the same shape.

        key and value [tokens, kv_heads * head_size], which a KV-shared layer ignores; kv_cache (k, v, None, None), k
        and v [slots, kv_heads, head_size].
        """
        key_cache, value_cache = kv_cache[:2]
        slots = attn_metadata.slot_mapping.flatten()
        if self.kv_sharing_target_layer_name is None:
            assert key is not None and value is not None
            key = key.view(-1, self.num_kv_heads, self.head_size)
            value = value.view(-1, self.num_kv_heads, self.head_size)
            self.k_cache(key, key_cache, slots)
            self.v_cache(value, value_cache, slots)
        elif attn_metadata.is_prompt:
            # What the target layer wrote earlier in this pass; the layer's own key and value are not normed or rotated.
            key, value = key_cache.index_select(0, slots), value_cache.index_select(0, slots)
        for cache in (self.k_cache, self.v_cache):
            _set_fetch_by_id(cache, attn_metadata.is_prompt)
        caches = [cache.unflatten(0, (-1, attn_metadata.block_size)) for cache in (key_cache, value_cache)]
        heads = query.view(-1, self.num_heads, self.head_size)
        if attn_metadata.is_prompt:
            assert key is not None and value is not None
            return self._prompt(heads, key, value, caches, attn_metadata).reshape(query.shape)
        return self._decode(heads, caches, attn_metadata).reshape(query.shape)

    def _fetch(self, caches: list[torch.Tensor], blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """-> keys, values [n, block_size, kv_heads, head_size]"""
        return self.k_cache.fetch_from_cache(caches[0], blocks), self.v_cache.fetch_from_cache(caches[1], blocks)

    def _prompt(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, caches: list[torch.Tensor], metadata: Any
    ) -> torch.Tensor:
        """query [bs * seq, heads, head_size], key and value [bs * seq, kv_heads, head_size] -> query's shape."""
        batch_size = metadata.seq_lens_tensor.shape[0]
        query, key, value = (x.unflatten(0, (batch_size, -1)) for x in (query, key, value))
        blocks, bias = metadata.block_list, metadata.attn_bias
        if self.sliding_window:
            blocks = blocks if metadata.window_block_list is None else metadata.window_block_list
            bias = metadata.window_attn_bias
            if bias is None:  # the kernel's own window
                bias = query.new_full((query.shape[1],) * 2, -torch.inf).triu_(1)
                bias += torch.full_like(bias, -torch.inf).tril_(-self.sliding_window)
        if blocks is not None:
            past_key, past_value = (x.reshape(batch_size, -1, *x.shape[2:]) for x in self._fetch(caches, blocks))
            key, value = torch.cat((past_key, key), dim=1), torch.cat((past_value, value), dim=1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return self._sdpa(query, key, value, bias, is_causal=bias is None).transpose(1, 2)

    def _decode(self, query: torch.Tensor, caches: list[torch.Tensor], metadata: Any) -> torch.Tensor:
        """query [bs, heads, head_size], one per sequence, over whole blocks -> query's shape."""
        prefix = "window_" if self.sliding_window and metadata.window_block_list is not None else ""
        blocks, groups, bias = (
            getattr(metadata, prefix + name) for name in ("block_list", "block_groups", "attn_bias")
        )
        keys, values = self._fetch(caches, blocks)
        out = torch.zeros_like(query)
        for row in groups.unique().tolist():
            if row == query.shape[0]:  # padding blocks
                continue
            mine = groups == row
            row_key, row_value = (x[mine].flatten(0, 1).transpose(0, 1) for x in (keys, values))
            out[row] = self._sdpa(query[row].unsqueeze(1), row_key, row_value, bias[mine].flatten().unsqueeze(0))[:, 0]
        return out

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """[..., heads, queries, head_size] over [..., kv_heads, keys, head_size]."""
        key, value = (x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=-3) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=is_causal, scale=self.scale)
