# SPDX-License-Identifier: Apache-2.0
"""Attention backend of the KV-shared layers: one query per sequence in a reduced prompt pass, else the plugin's own."""

from typing import Any, NamedTuple

import torch

from vllm_gaudi_ext.hpu import HPUAttentionBackendV1, HPUAttentionImpl, PromptPass, fetch_slots
from vllm_gaudi_ext.ops import context_slots, single_query_attention, visible_slots


class SharedKV(NamedTuple):
    """What the last token of each sequence attends to on the layers that share one target layer's KV cache."""

    key: torch.Tensor  # [batch, width, num_kv_heads, head_size]
    value: torch.Tensor  # [batch, width, num_kv_heads, head_size]
    visible: torch.Tensor  # [batch, width] bool


class LastTokenMetadata(NamedTuple):
    """Attention metadata of a reduced prompt pass: the K/V of each target layer, by the target's layer name."""

    shared_kv: dict[str, SharedKV]


class HpuSharedKVAttentionImpl(HPUAttentionImpl):
    """The plugin's attention, and one-row attention when the metadata says that the pass is reduced."""

    def gather_shared_kv(self, kv_cache: tuple[torch.Tensor, ...], prompt: PromptPass) -> SharedKV:
        """Read context and prompt from the target's cache, which the target layer has written earlier in this pass.

        Args:
            kv_cache: ``(keys, values, ...)``, each [num_slots, num_kv_heads, head_size].
            prompt: the pass.
        """
        slots, visible = visible_slots(prompt.slot_mapping, prompt.query_lens, self.sliding_window)
        context = prompt.sliding_context if self.sliding_window else prompt.full_context
        if context is not None:
            past = context_slots(context.block_list, context.block_size, context.attn_bias, prompt.query_lens)
            slots, visible = torch.cat((past[0], slots), dim=1), torch.cat((past[1], visible), dim=1)
        shape = (*slots.shape, self.num_kv_heads, self.head_size)
        key = fetch_slots(self.k_cache, kv_cache[0], slots.flatten()).view(shape)
        value = fetch_slots(self.v_cache, kv_cache[1], slots.flatten()).view(shape)
        return SharedKV(key, value, visible)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: tuple[torch.Tensor, ...],
        attn_metadata: Any,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``HPUAttentionImpl.forward``.

        In a reduced pass ``query`` is [batch, num_heads * head_size], and ``key`` and ``value`` are not read: a
        KV-shared layer has none of its own.
        """
        if not isinstance(attn_metadata, LastTokenMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        shared = attn_metadata.shared_kv[self.kv_sharing_target_layer_name]
        heads = query.view(-1, self.num_heads, self.head_size)
        return single_query_attention(heads, shared.key, shared.value, shared.visible, self.scale).view_as(query)


class HpuSharedKVAttentionBackend(HPUAttentionBackendV1):
    """Backend of the KV-shared layers while fast prefill is active."""

    @staticmethod
    def get_impl_cls() -> type[HpuSharedKVAttentionImpl]:
        return HpuSharedKVAttentionImpl
