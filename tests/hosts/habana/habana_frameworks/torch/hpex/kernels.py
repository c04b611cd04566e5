# SPDX-License-Identifier: Apache-2.0
import enum
import math
from typing import Any

import torch
import torch.nn.functional as F


class FusedSDPA:
    """Scaled dot product attention with grouped key/value heads, as the fused kernel computes it."""

    @staticmethod
    def apply(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "fast",
        recompute_mode: bool = True,
        valid_sequence_lengths: torch.Tensor | None = None,
        padding_side: str = "left",
        inference_mode: bool = False,
        is_fp8: bool = False,
        window_size: tuple[int, int] | None = (-1, -1),
        sinks: torch.Tensor | None = None,
        *unsupported: Any,
    ) -> torch.Tensor:
        """Attends with every query head to the keys of its group, softmax in float32.

        Args:
            query: [batch, heads, queries, head_size]
            key, value: [batch, kv_heads, keys, head_size]; heads is a multiple of kv_heads
            attn_mask: additive, broadcastable to [batch, 1 or heads, queries, keys]
            valid_sequence_lengths: [batch], the keys that count in each row; the padding is to their right
            window_size: keys to the left, the query's own included, and to the right; -1 for no bound

        Returns:
            [batch, heads, queries, head_size] in the query's dtype; zero where a query sees no key.
        """
        if dropout_p or sinks is not None or unsupported:
            raise NotImplementedError("FusedSDPA on CPU: dropout and sinks")
        if valid_sequence_lengths is not None and padding_side != "right":
            raise NotImplementedError("FusedSDPA on CPU: padding on the left")
        heads, queries = query.shape[1:3]
        kv_heads, keys = key.shape[1:3]
        key_index = torch.arange(keys, device=query.device)
        distance = torch.arange(keys - queries, keys, device=query.device).unsqueeze(1) - key_index  # [queries, keys]
        left, right = window_size or (-1, -1)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if is_causal:
            hidden = hidden | (distance < 0)
        if left >= 0:
            hidden = hidden | (distance >= left)
        if right >= 0:
            hidden = hidden | (distance < -right)
        hidden = hidden.view(1, 1, queries, keys)
        if valid_sequence_lengths is not None:
            hidden = hidden | (key_index >= valid_sequence_lengths.view(-1, 1, 1, 1))
        mask = torch.zeros_like(hidden, dtype=torch.float32) if attn_mask is None else attn_mask.float()
        # "Minus infinity" comes as the lowest number of some dtype, which must not survive a row of nothing else.
        mask = mask.masked_fill(hidden | (mask < torch.finfo(torch.bfloat16).min / 2), -math.inf)

        # Torch's own fused attention holds no [queries, keys] per head; a row of -inf alone gives zeros.
        key, value = (x.float().repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
        output = F.scaled_dot_product_attention(query.float(), key, value, mask, scale=scale or None)
        return output.to(query.dtype)


class RotaryPosEmbeddingMode(enum.Enum):
    BLOCKWISE = 0  # pairs (i, i + dim / 2)
    PAIRWISE = 1  # pairs (2 i, 2 i + 1)


def apply_rotary_pos_emb(
    p: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: None = None,
    offset: int = 0,
    mode: RotaryPosEmbeddingMode = RotaryPosEmbeddingMode.BLOCKWISE,
) -> torch.Tensor:
    """Rotates `p` [tokens, heads, dim] by `cos` and `sin` [tokens, 1, dim], one row per token."""
    if position_ids is not None or offset:
        raise NotImplementedError("apply_rotary_pos_emb on CPU: position_ids and offset")
    if mode is RotaryPosEmbeddingMode.BLOCKWISE:
        first, second = p.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-p[..., 1::2], p[..., ::2]), dim=-1).flatten(-2)
    return p * cos + turned * sin
