# SPDX-License-Identifier: Apache-2.0
"""What a prompt pass is, when the last layers may run on its last tokens alone, and what is then reduced with them."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context
from vllm_gaudi.extension.ops import LoraMask

# How many rows of a sequence are read after a pass is known to the runner alone. It tells the model in a metadata field
# that only mamba layers use otherwise: fields are part of a graph's inputs, so that a replayed graph never serves the
# other kind of pass.
_READ_AT_SEVERAL_ROWS = "prep_initial_states"


def mark_read_at_several_rows(attn_metadata: Any) -> None:
    """Mark a pass of which the runner reads more than the last row of a sequence, before its metadata is trimmed.

    Without the mark such a pass would return unfinished hidden states in all rows but the last.
    """
    setattr(attn_metadata, _READ_AT_SEVERAL_ROWS, True)


class CachedContext(NamedTuple):
    """The cached tokens in front of a prompt pass, as the layers of one attention type see them."""

    block_list: torch.Tensor  # [batch * blocks] int32, -1 for padding
    attn_bias: torch.Tensor  # [batch, 1, padded_len, blocks * block_size + padded_len], the pass' own additive mask


class PromptPass(NamedTuple):
    """A prompt pass: a padded batch of sequences, real tokens first in each row, with or without cached context."""

    query_lens: torch.Tensor  # [batch] int32, real tokens per sequence in this pass, 0 for a padding sequence
    slot_mapping: torch.Tensor  # [batch, padded_len] int64, KV cache slot of each position, -1 for padding
    block_size: int  # slots per block of the KV cache
    full_context: CachedContext | None  # of the full-attention layers
    sliding_context: CachedContext | None  # of the sliding-window layers: the last blocks, which hold the window


def fast_prompt_pass(attn_metadata: Any, kv_caches: Iterable[Any],
                     aux_hidden_state_layers: tuple[int, ...]) -> PromptPass | None:
    """The pass that ``attn_metadata`` describes, if its last layers may run on last tokens alone, else None.

    Only what is part of a graph's key decides: the kind of pass, which fields are None, and shapes; never a tensor's
    values.

    Args:
        attn_metadata: the metadata of all layers in the forward context.
        kv_caches: ``kv_cache`` of each layer whose cache those layers read.
        aux_hidden_state_layers: layers whose hidden states a drafter reads, at every token.
    """
    if attn_metadata is None or not attn_metadata.is_prompt or getattr(attn_metadata, _READ_AT_SEVERAL_ROWS):
        return None
    # The run that measures memory comes before there is a KV cache.
    if aux_hidden_state_layers or not all(isinstance(kv_cache, tuple) for kv_cache in kv_caches):
        return None
    prompt = PromptPass(attn_metadata.seq_lens_tensor, attn_metadata.slot_mapping, attn_metadata.block_size, None, None)
    if attn_metadata.block_list is None:
        return prompt

    # The plugin gives the sliding layers blocks of their own if it knows the model type, else all of them.
    window_block_list = attn_metadata.window_block_list
    if window_block_list is None:
        window_block_list = attn_metadata.block_list
    full_context = CachedContext(attn_metadata.block_list, attn_metadata.attn_bias)
    sliding_context = CachedContext(window_block_list, attn_metadata.window_attn_bias)
    batch, padded_len = prompt.slot_mapping.shape
    for cached in (full_context, sliding_context):
        # Without FusedSDPA the plugin masks the context of no sliding layer; what it then does is not ours to repeat.
        frame_len = cached.block_list.numel() // batch * prompt.block_size + padded_len
        if cached.attn_bias is None or cached.attn_bias.size(-1) != frame_len:
            return None
    return prompt._replace(full_context=full_context, sliding_context=sliding_context)


@contextlib.contextmanager
def reduced_to_rows(rows: torch.Tensor, attn_metadata: Any, rotary_modules: Iterable[Any]) -> Iterator[None]:
    """For the duration of the block, reduce to ``rows`` what is prepared for all tokens of a pass.

    That is the attention metadata in the forward context; the ``cos`` and ``sin`` of the HPU rotary embedding,
    [tokens, 1, rotary_dim], which ignores the positions it is called with once the model adapter has prepared them; and
    the mask that selects each token's LoRA adapter, [tokens, max_loras * max_rank]. All is put back as it was, also
    when the block raises: the adapter deletes cos and sin.

    Args:
        rows: rows of the pass, [rows] int64.
        attn_metadata: the metadata that the layers are to find.
        rotary_modules: modules that may hold prepared cos/sin; the others use the positions they are given.
    """
    forward_context = get_forward_context()
    whole_pass = forward_context.attn_metadata
    prepared = [(module, module.cos, module.sin) for module in rotary_modules if hasattr(module, "cos")]
    lora_mask = LoraMask.getLoraMask()
    try:
        forward_context.attn_metadata = attn_metadata
        for module, cos, sin in prepared:
            module.cos = cos.index_select(0, rows)
            module.sin = sin.index_select(0, rows)
        if lora_mask is not None:
            LoraMask.setLoraMask(lora_mask.index_select(0, rows))
        yield
    finally:
        forward_context.attn_metadata = whole_pass
        for module, cos, sin in prepared:
            module.cos = cos
            module.sin = sin
        LoraMask.setLoraMask(lora_mask)
