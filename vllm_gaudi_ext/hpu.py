# SPDX-License-Identifier: Apache-2.0
"""Everything this package takes from vllm-gaudi and from vLLM's Gemma 4, and the check that it is still there.

A change in either that concerns this package is followed up here: the classes it builds on, the fields it reads, the
buffers of the rotary embedding.
"""

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.gemma4 import Gemma4Attention, Gemma4DecoderLayer, Gemma4ForCausalLM, Gemma4Model
from vllm_gaudi.attention.backends.hpu_attn import HPUAttentionImpl
from vllm_gaudi.attention.backends.hpu_attn import _set_fetch_by_id as set_fetch_by_id
from vllm_gaudi.extension.ops import LoraMask
from vllm_gaudi.extension.runtime import get_config
from vllm_gaudi.models.gemma4 import HpuGemma4ForConditionalGeneration, HpuGemma4Model
from vllm_gaudi.models.gemma4 import _apply_hpu_gemma4_patches as apply_hpu_gemma4_patches
from vllm_gaudi.models.gemma4 import _hpu_run_decoder_layers as run_decoder_layers
from vllm_gaudi.v1.attention.backends.hpu_attn import HPUAttentionBackendV1, HPUAttentionMetadataV1

__all__ = [
    "Gemma4ForCausalLM",
    "HPUAttentionBackendV1",
    "HPUAttentionImpl",
    "HpuGemma4ForConditionalGeneration",
    "HpuGemma4Model",
    "READ_AT_SEVERAL_ROWS",
    "Context",
    "PromptPass",
    "apply_hpu_gemma4_patches",
    "drift",
    "fetch_slots",
    "get_config",
    "prompt_pass",
    "reduced_to_rows",
    "run_decoder_layers",
]

METADATA_FIELDS = (
    *("is_prompt", "seq_lens_tensor", "slot_mapping", "block_size", "prep_initial_states"),
    *("block_list", "attn_bias", "window_block_list", "window_attn_bias"),
)
FEATURES = ("flatten_input", "merged_prefill", "prompt_attn_impl", "enable_fsdpa_slicing", "bucketing_strategy")
PER_LAYER_INPUT_ATTRIBUTES = (
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "embed_tokens_per_layer", "embed_scale_per_layer"),
    *("per_layer_model_projection", "per_layer_projection_scale", "per_layer_projection_norm", "per_layer_input_scale"),
)


# How many rows of a sequence are read after a pass is known to the runner alone. It tells the model in a metadata field
# that only mamba layers use otherwise: fields are part of a graph's inputs, so that a replayed graph never serves the
# other kind of pass.
READ_AT_SEVERAL_ROWS = "prep_initial_states"


class Context(NamedTuple):
    """The cached context in front of a prompt pass, as the layers of one attention type see it."""

    block_list: torch.Tensor  # [batch * blocks] int32, -1 for padding
    attn_bias: torch.Tensor  # [batch, 1, padded_len, blocks * block_size + padded_len], the pass' own additive mask


class PromptPass(NamedTuple):
    """A prompt pass: a padded batch of sequences, real tokens first in each row, with or without cached context."""

    query_lens: torch.Tensor  # [batch] int32, real tokens per sequence in this pass, 0 for a padding sequence
    slot_mapping: torch.Tensor  # [batch, padded_len] int64, KV cache slot of each position, -1 for padding
    block_size: int  # slots per block of the KV cache
    full_context: Context | None  # context of the full-attention layers
    sliding_context: Context | None  # context of the sliding-window layers: its last blocks, which hold the window


def prompt_pass(attn_metadata: Any) -> PromptPass | None:
    """The pass that ``attn_metadata`` describes, if the KV-shared layers may run on its last tokens alone, else None.

    Only what is part of a graph's key decides: the kind of pass, which fields are None, and shapes; never a tensor's
    values.
    """
    if attn_metadata is None or not attn_metadata.is_prompt or getattr(attn_metadata, READ_AT_SEVERAL_ROWS):
        return None
    prompt = PromptPass(attn_metadata.seq_lens_tensor, attn_metadata.slot_mapping, attn_metadata.block_size, None, None)
    if attn_metadata.block_list is None:
        return prompt

    # The plugin gives the sliding layers blocks of their own if it knows the model type, else all of them.
    window_block_list = attn_metadata.window_block_list
    if window_block_list is None:
        window_block_list = attn_metadata.block_list
    full_context = Context(attn_metadata.block_list, attn_metadata.attn_bias)
    sliding_context = Context(window_block_list, attn_metadata.window_attn_bias)
    batch, padded_len = prompt.slot_mapping.shape
    for context in (full_context, sliding_context):
        # Without FusedSDPA the plugin masks the context of no sliding layer; what it then does is not ours to repeat.
        frame_len = context.block_list.numel() // batch * prompt.block_size + padded_len
        if context.attn_bias is None or context.attn_bias.size(-1) != frame_len:
            return None
    return prompt._replace(full_context=full_context, sliding_context=sliding_context)


def fetch_slots(cache_module: Any, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Read KV cache slots the way the plugin does, which dequantizes an FP8 cache.

    Args:
        cache_module: the ``k_cache`` or ``v_cache`` of an attention layer.
        cache: [num_slots, num_kv_heads, head_size].
        slots: [n] int64.

    Returns:
        [n, num_kv_heads, head_size] in the model's dtype.
    """
    set_fetch_by_id(cache_module, True)  # contiguous paged attention would read the first n slots instead
    return cache_module.fetch_from_cache(cache, slots)


@contextlib.contextmanager
def reduced_to_rows(rotary_modules: Iterable[Any], rows: torch.Tensor) -> Iterator[None]:
    """For the duration of the block, reduce to ``rows`` what the plugin keeps prepared for all tokens of a pass.

    The HPU rotary embedding ignores the positions it is called with once the model adapter has prepared its ``cos``
    and ``sin``, [tokens, 1, rotary_dim]; LoRA layers multiply by a mask that selects each token's adapter, [tokens,
    max_loras * max_rank]. All is put back as it was, also when the block raises: the adapter deletes cos and sin.

    Args:
        rotary_modules: modules that may hold prepared cos/sin; the others use the positions they are given.
        rows: [rows] int64.
    """
    prepared = [(module, module.cos, module.sin) for module in rotary_modules if hasattr(module, "cos")]
    lora_mask = LoraMask.getLoraMask()
    try:
        for module, cos, sin in prepared:
            module.cos = cos.index_select(0, rows)
            module.sin = sin.index_select(0, rows)
        if lora_mask is not None:
            LoraMask.setLoraMask(lora_mask.index_select(0, rows))
        yield
    finally:
        for module, cos, sin in prepared:
            module.cos = cos
            module.sin = sin
        LoraMask.setLoraMask(lora_mask)


def drift() -> list[str]:
    """Where the installed vllm and vllm-gaudi differ from what this package relies on; empty if nowhere.

    Raises:
        ImportError: if a module is not there at all.
    """
    from vllm_gaudi.extension.utils import VLLMKVCache
    from vllm_gaudi.ops.hpu_rotary_embedding import HPURotaryEmbedding
    from vllm_gaudi.v1.worker.hpu_model_runner import BatchContents, HPUModelRunner

    model_args = ("input_ids", "positions", "intermediate_tensors", "inputs_embeds", "per_layer_inputs")
    layer_args = ("positions", "hidden_states", "residual", "per_layer_input")
    attention_args = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
    cache_args = ("input", "cache", "slot_mapping", "scales", "block_size", "is_prompt")
    findings = [
        *_misfit_method(HpuGemma4Model, "forward", model_args),
        *_misfit_method(Gemma4DecoderLayer, "forward", layer_args),
        *_missing_parameters(run_decoder_layers, ("decoder_layers", "positions", "hidden_states", "per_layer_inputs")),
        *_missing_parameters(apply_hpu_gemma4_patches, ("language_model",)),
        *_misfit_method(Gemma4Model, "embed_input_ids", ("input_ids",)),
        *_misfit_method(Gemma4Model, "get_per_layer_inputs", ("input_ids",)),
        *_misfit_method(Gemma4Model, "project_per_layer_inputs", ("inputs_embeds", "per_layer_inputs")),
        *_misfit_method(HPUAttentionImpl, "forward", attention_args),
        *_misfit_method(HPUAttentionBackendV1, "get_impl_cls", ()),
        *_misfit_method(VLLMKVCache, "forward", cache_args),
        *_misfit_method(VLLMKVCache, "fetch_from_cache", ("cache", "blocks")),
        *_missing_parameters(set_fetch_by_id, ("kv_cache", "value")),
        *_misfit_method(LoraMask, "getLoraMask", ()),
        *_misfit_method(LoraMask, "setLoraMask", ("mask",)),
        *_misfit_method(HPUModelRunner, "_form_prefill_batch", ("contents",)),
        *_unknown_features(FEATURES),
        *_missing_fields(BatchContents, ("logits_positions",)),
        *_missing_fields(ForwardContext, ("attn_metadata",)),
        *_missing_fields(HPUAttentionMetadataV1, METADATA_FIELDS),
        *_unassigned(Gemma4Model, ("layers", "norm", "fast_prefill_enabled", *PER_LAYER_INPUT_ATTRIBUTES)),
        *_unassigned(Gemma4DecoderLayer, ("self_attn", "input_layernorm")),
        *_unassigned(Gemma4Attention, ("qkv_proj", "k_norm", "v_norm", "rotary_emb", "attn", "q_size", "kv_size")),
        *_unassigned(HPUAttentionImpl, ("num_heads", "num_kv_heads", "head_size", "scale", "sliding_window")),
        *_unassigned(HPUAttentionImpl, ("kv_sharing_target_layer_name", "k_cache", "v_cache")),
        *_unassigned(HPURotaryEmbedding, ("cos", "sin")),
    ]
    return findings


def _where(obj: Callable[..., Any]) -> str:
    return f"{obj.__module__}.{obj.__qualname__}"


def _missing_parameters(function: Callable[..., Any], names: tuple[str, ...]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [f"{_where(function)} has no parameter {name!r}" for name in names if name not in parameters]


def _misfit_method(cls: type, method: str, names: tuple[str, ...]) -> list[str]:
    function = getattr(cls, method, None)
    return [f"{_where(cls)} has no method {method!r}"] if function is None else _missing_parameters(function, names)


def _unknown_features(names: tuple[str, ...]) -> list[str]:
    unknown = []
    for name in names:
        try:
            getattr(get_config(), name)
        except (AssertionError, AttributeError):
            unknown.append(f"vllm-gaudi has no feature {name!r}")
    return unknown


def _missing_fields(cls: type, names: tuple[str, ...]) -> list[str]:
    fields = {field.name for field in dataclasses.fields(cls)}
    return [f"{_where(cls)} has no field {name!r}" for name in names if name not in fields]


def _unassigned(cls: type, names: tuple[str, ...]) -> list[str]:
    source = inspect.getsource(cls)
    return [
        f"{_where(cls)} does not set {name!r}"
        for name in names
        if not re.search(rf'self\.{name}\b[^=(\n]*=|register_buffer\(\s*"{name}"', source)
    ]
