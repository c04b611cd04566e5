# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a reduced prompt pass: which rows, which KV cache slots, and attention with one query per sequence.

Pure functions on tensors with static output shapes: no host synchronisation and no branch on tensor values, so that
they can be part of an HPU graph and trace under ``torch.compile(fullgraph=True)``.

A prompt pass is a padded batch of ``batch`` sequences of ``padded_len`` positions. Sequence ``i`` has
``query_lens[i]`` real tokens at the start of its row; a padding sequence has none.
"""

import torch


def last_token_rows(query_lens: torch.Tensor, padded_len: int) -> torch.Tensor:
    """Rows of each sequence's last real token in the flattened pass: ``i * padded_len + query_lens[i] - 1``.

    Args:
        query_lens: real tokens per sequence, [batch], any integer dtype.
        padded_len: positions per sequence, padding included.

    Returns:
        Row indices, [batch] int64, all distinct. A padding sequence gets its own first row: ``-1`` would alias the
        last row of the sequence before it, and scattering to both would lose that sequence's result.
    """
    lens = query_lens.to(torch.int64).clamp(min=1)
    return torch.arange(lens.size(0), dtype=torch.int64, device=lens.device) * padded_len + lens - 1


def visible_slots(slot_mapping: torch.Tensor, query_lens: torch.Tensor,
                  sliding_window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """KV cache slots of this pass that each sequence's last token attends to.

    The last token, at position ``p = query_lens[i] - 1`` of its row, sees position ``j`` if ``j <= p`` and, on a
    sliding layer, ``p - j < sliding_window``: a contiguous range that ends at ``p``. Only the window's slots are
    returned, not the prompt's.

    Args:
        slot_mapping: KV cache slot of each position, [batch, padded_len] int64; padding is -1.
        query_lens: real tokens per sequence, [batch], any integer dtype.
        sliding_window: tokens in the window, or None on a full-attention layer.

    Returns:
        ``(slots, visible)``, both [batch, width] with ``width = min(sliding_window, padded_len)``: int64 slots in
        order of position, and a bool mask. Where ``visible`` is False the slot is the sequence's own first one: a -1
        would make the device gather out of bounds, and what is gathered there must be finite, since zero times NaN is
        NaN. A padding sequence sees slot 0 once, so that its softmax is finite too.
    """
    padded_len = slot_mapping.size(1)
    width = padded_len if sliding_window is None else min(sliding_window, padded_len)
    lens = query_lens.to(torch.int64).clamp(min=1).unsqueeze(1)
    positions = (lens - width).clamp(min=0) + torch.arange(width, dtype=torch.int64, device=lens.device)
    visible = positions < lens
    slots = slot_mapping.gather(1, torch.where(visible, positions, 0)).clamp(min=0)
    return slots, visible


def context_slots(block_list: torch.Tensor, block_size: int, attn_bias: torch.Tensor,
                  query_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KV cache slots of the cached context in front of this pass, and which of them each last token attends to.

    What is visible is read from the mask that the pass itself uses, not computed again: on sliding layers that mask
    shows the context one token more than the window.

    Args:
        block_list: blocks of the context, [batch * blocks], any integer dtype; padding is -1.
        block_size: tokens per block.
        attn_bias: additive mask over [context | this pass], [batch, 1, padded_len, blocks * block_size + padded_len],
            zero where visible.
        query_lens: real tokens per sequence, [batch], any integer dtype.

    Returns:
        ``(slots, visible)``, both [batch, blocks * block_size], int64 and bool. Padding blocks read as block 0.
    """
    batch, _, _, frame_len = attn_bias.shape
    blocks = block_list.to(torch.int64).clamp(min=0).view(batch, -1, 1)
    slots = (blocks * block_size + torch.arange(block_size, device=blocks.device)).flatten(1)
    last = (query_lens.to(torch.int64).clamp(min=1) - 1).view(batch, 1, 1).expand(batch, 1, frame_len)
    return slots, attn_bias[:, 0].gather(1, last)[:, 0, :slots.size(1)] == 0


def single_query_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor,
                           scale: float) -> torch.Tensor:
    """Grouped-query attention of one query per sequence, in float32 from the scores to the weighted sum.

    Args:
        query: [batch, num_heads, head_size].
        key, value: [batch, width, num_kv_heads, head_size] float32; query head ``h`` reads KV head
            ``h // (num_heads // num_kv_heads)``.
        visible: [batch, width] bool, at least one True per sequence.
        scale: factor of the scores.

    Returns:
        [batch, num_heads, head_size] in the dtype of ``query``.
    """
    grouped = query.float().unflatten(1, (key.size(2), -1))  # [batch, num_kv_heads, group, head_size]
    scores = torch.matmul(grouped * scale, key.permute(0, 2, 3, 1))  # [batch, num_kv_heads, group, width]
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    output = torch.matmul(weights, value.transpose(1, 2))  # [batch, num_kv_heads, group, head_size]
    return output.flatten(1, 2).to(query.dtype)
