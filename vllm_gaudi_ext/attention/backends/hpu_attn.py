# SPDX-License-Identifier: Apache-2.0
"""Attention of the layers that run on last tokens: one query per sequence in a reduced pass, else the plugin's own."""

from typing import Any, NamedTuple

import torch
from vllm_gaudi.attention.backends.hpu_attn import HPUAttentionImpl
from vllm_gaudi.attention.backends.hpu_attn import _set_fetch_by_id as set_fetch_by_id
from vllm_gaudi.v1.attention.backends.hpu_attn import HPUAttentionBackendV1

from vllm_gaudi_ext.ops import context_slots, single_query_attention, visible_slots
from vllm_gaudi_ext.prompt_pass import PromptPass


class SharedKV(NamedTuple):
    """What the last token of each sequence attends to on the layers that read one layer's KV cache.

    In float32, in which the attention is computed: converted once, not in each layer that reads it.
    """

    key: torch.Tensor  # [batch, width, num_kv_heads, head_size] float32
    value: torch.Tensor  # [batch, width, num_kv_heads, head_size] float32
    visible: torch.Tensor  # [batch, width] bool


class LastTokenMetadata(NamedTuple):
    """Attention metadata of a reduced prompt pass, in which each sequence is its last token."""

    shared_kv: dict[str, SharedKV]  # the K/V in each KV cache that is read, by its layer's name
    is_prompt: bool = True  # as in the plugin's metadata, since layers other than attention may ask


class HpuSharedKVAttentionImpl(HPUAttentionImpl):
    """The plugin's attention, and one-row attention when the metadata says that the pass is reduced."""

    def gather_shared_kv(self, kv_cache: tuple[torch.Tensor, ...], prompt: PromptPass) -> SharedKV:
        """Read context and prompt from a KV cache, to which its layer has written the prompt earlier in this pass.

        Args:
            kv_cache: ``(keys, values, ...)``, each [num_slots, num_kv_heads, head_size].
            prompt: the pass.
        """
        slots, visible = visible_slots(prompt.slot_mapping, prompt.query_lens, self.sliding_window)
        cached = prompt.sliding_context if self.sliding_window else prompt.full_context
        if cached is not None:
            past_slots, past_visible = context_slots(cached.block_list, prompt.block_size, cached.attn_bias,
                                                     prompt.query_lens)
            slots, visible = torch.cat((past_slots, slots), dim=1), torch.cat((past_visible, visible), dim=1)
        shape = (*slots.shape, self.num_kv_heads, self.head_size)
        key = _fetch_slots(self.k_cache, kv_cache[0], slots.flatten()).float().view(shape)
        value = _fetch_slots(self.v_cache, kv_cache[1], slots.flatten()).float().view(shape)
        return SharedKV(key, value, visible)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: tuple[Any, ...], prompt: PromptPass) -> None:
        """Write the K/V of all tokens of a pass to this layer's cache, as the plugin's forward does.

        Args:
            key, value: [batch * padded_len, num_kv_heads * head_size], normed, and the key rotated.
            kv_cache: ``(keys, values, key scales or None, value scales or None)``.
            prompt: the pass.
        """
        slots = prompt.slot_mapping.flatten()
        for module, new, cache, scales in (
            (self.k_cache, key, kv_cache[0], kv_cache[2]),
            (self.v_cache, value, kv_cache[1], kv_cache[3]),
        ):
            new = new.view(-1, self.num_kv_heads, self.head_size)
            if new.dtype == torch.float32:
                new = new.to(cache.dtype)
            module(new, cache, slots, scales=scales, block_size=prompt.block_size, is_prompt=True)

    def forward(self,
                layer: Any,
                query: torch.Tensor,
                key: torch.Tensor | None,
                value: torch.Tensor | None,
                kv_cache: tuple[torch.Tensor, ...],
                attn_metadata: Any,
                output: torch.Tensor | None = None) -> torch.Tensor:
        """As ``HPUAttentionImpl.forward``.

        In a reduced pass ``query`` is [batch, num_heads * head_size], and ``key`` and ``value`` are not read: the
        K/V of all tokens are in the metadata.
        """
        if not isinstance(attn_metadata, LastTokenMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        shared = attn_metadata.shared_kv[self.kv_sharing_target_layer_name or layer.layer_name]
        heads = query.view(-1, self.num_heads, self.head_size)
        return single_query_attention(heads, shared.key, shared.value, shared.visible, self.scale).view_as(query)


class HpuSharedKVAttentionBackend(HPUAttentionBackendV1):
    """Backend of the layers that run on last tokens while fast prefill is active."""

    @staticmethod
    def get_impl_cls() -> type[HpuSharedKVAttentionImpl]:
        return HpuSharedKVAttentionImpl


def _fetch_slots(cache_module: Any, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Slots [n] of a cache [num_slots, num_kv_heads, head_size], read by the plugin's module, which dequantizes FP8."""
    set_fetch_by_id(cache_module, True)  # contiguous paged attention would read the first n slots instead
    return cache_module.fetch_from_cache(cache, slots)
