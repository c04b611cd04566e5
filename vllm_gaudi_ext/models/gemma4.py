# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 with fast prefill: in a prompt pass the KV-shared layers run on each prompt's last token alone.

The last ``num_kv_shared_layers`` layers own no KV cache, so at a prompt token nothing reads their output, except at
the token that is sampled. Follow a pass from ``HpuGemma4FastPrefillModel.forward``: is it eligible; in
``LastTokenLayers.forward``, which rows, and the layers on them; then the one-row attention of
``vllm_gaudi_ext.attention.backends.hpu_attn``.
"""

from itertools import islice
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sequence import IntermediateTensors

from vllm_gaudi_ext.attention.backends.hpu_attn import (
    HpuSharedKVAttentionBackend,
    HpuSharedKVAttentionImpl,
    LastTokenMetadata,
)
from vllm_gaudi_ext.config import check_at_load, inert_reason, normal_path_reason, refuse_unsupported
from vllm_gaudi_ext.hpu import (
    Gemma4ForCausalLM,
    HpuGemma4ForConditionalGeneration,
    HpuGemma4Model,
    PromptPass,
    apply_hpu_gemma4_patches,
    prompt_pass,
    reduced_to_rows,
    run_decoder_layers,
)
from vllm_gaudi_ext.ops import last_token_rows
from vllm_gaudi_ext.patches import mark_passes_read_at_several_rows

logger = init_logger(f"vllm.{__name__}")  # a child of the logger that vLLM configures


class HpuGemma4FastPrefillModel(HpuGemma4Model):
    """``HpuGemma4Model`` whose prompt passes run the KV-shared layers on last tokens alone."""

    last_token_layers: torch.nn.ModuleList  # of one LastTokenLayers; set by enable_fast_prefill

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
        per_layer_inputs: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        """As ``HpuGemma4Model.forward``.

        Args:
            input_ids: [batch * padded_len], or None with ``inputs_embeds``.
            positions: [batch, padded_len] int32, -1 for padding.
            inputs_embeds: [batch * padded_len, hidden_size].
            per_layer_inputs: per-layer embeddings of ``inputs_embeds``, [batch * padded_len, num_layers, ple_dim].

        Returns:
            [batch * padded_len, hidden_size]. In a reduced pass only the rows of the last tokens are final hidden
            states; the others are those that enter the KV-shared layers, which the model runner never reads.
        """
        last_token_layers: Any = self.last_token_layers[0]
        prompt = prompt_pass(get_forward_context().attn_metadata)
        # A drafter (aux_hidden_state_layers) reads hidden states of every token, and the memory profiling run comes
        # before there is a KV cache to read.
        if prompt is None or self.aux_hidden_state_layers or not last_token_layers.has_kv_cache():
            return super().forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, per_layer_inputs, **kwargs
            )

        if inputs_embeds is None:
            hidden_states = self.embed_input_ids(input_ids)
            per_layer_inputs = self.get_per_layer_inputs(input_ids)
        else:
            hidden_states = inputs_embeds
        per_layer_inputs = self.project_per_layer_inputs(hidden_states, per_layer_inputs)
        own_kv_layers = islice(self.layers, last_token_layers.first)
        hidden_states = run_decoder_layers(own_kv_layers, 0, positions, hidden_states, per_layer_inputs, **kwargs)
        return last_token_layers(prompt, positions, hidden_states, per_layer_inputs, **kwargs)


class LastTokenLayers(torch.nn.Module):
    """The KV-shared layers and the final norm of a model, on the last token of each sequence of a prompt pass.

    The model holds it in a ``ModuleList`` of its own: in compile mode the plugin compiles each child of one as a
    region, and so this whole part of the pass.
    """

    first: int  # index of the first KV-shared layer
    layers: tuple[Any, ...]  # the KV-shared layers
    norm: Any  # the model's final norm
    rotary_modules: tuple[Any, ...]  # the distinct rotary embeddings of the KV-shared layers
    readers: dict[str, Any]  # for each target layer's name, the attention of one KV-shared layer that reads its cache

    def __init__(self, model: HpuGemma4Model, first: int) -> None:
        """
        Args:
            model: the model whose layers these are.
            first: index of the first KV-shared layer.
        """
        super().__init__()
        layers = tuple(islice(model.layers, first, None))
        attentions = [layer.self_attn.attn for layer in layers]
        self.first = first
        # In __dict__, hidden from nn.Module: quantizers and weight loaders walk modules by name, and must find each
        # layer once, under its own.
        self.__dict__.update(
            layers=layers,
            norm=model.norm,
            rotary_modules=tuple(dict.fromkeys(layer.self_attn.rotary_emb for layer in layers)),
            readers={attention.kv_sharing_target_layer_name: attention for attention in attentions},
        )

    def has_kv_cache(self) -> bool:
        return all(isinstance(attention.kv_cache, tuple) for attention in self.readers.values())

    def forward(
        self,
        prompt: PromptPass,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        per_layer_inputs: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Args:
            prompt: the pass.
            positions: [batch, padded_len] int32.
            hidden_states: what enters the first KV-shared layer, [batch * padded_len, hidden_size].
            per_layer_inputs: projected per-layer inputs of all layers, [batch * padded_len, num_layers, ple_dim].

        Returns:
            ``hidden_states`` with the final hidden states in the rows of the last tokens.
        """
        rows = last_token_rows(prompt.query_lens, prompt.slot_mapping.size(1))  # [batch]
        context = get_forward_context()
        whole_pass = context.attn_metadata
        context.attn_metadata = LastTokenMetadata(
            {target: attn.impl.gather_shared_kv(attn.kv_cache, prompt) for target, attn in self.readers.items()}
        )
        try:
            with reduced_to_rows(self.rotary_modules, rows):
                last_hidden_states = run_decoder_layers(
                    self.layers,
                    self.first,
                    positions.view(-1, 1).index_select(0, rows),
                    hidden_states.index_select(0, rows),
                    None if per_layer_inputs is None else per_layer_inputs.index_select(0, rows),
                    **kwargs,
                )
        finally:
            context.attn_metadata = whole_pass
        return hidden_states.index_copy(0, rows, self.norm(last_hidden_states))


def enable_fast_prefill(language_model: Gemma4ForCausalLM, vllm_config: VllmConfig) -> None:
    """Give a constructed Gemma 4 fast prefill, if ``--kv-sharing-fast-prefill`` is on and can be honoured.

    Says in one line that it is on and for which layers, or why it is not.

    Raises:
        ValueError: for a setting that can neither be honoured nor take the normal path.
    """
    if not vllm_config.cache_config.kv_sharing_fast_prefill:
        return
    model = language_model.model
    _disable_upstream_fast_prefill(model)

    reason = inert_reason(language_model.config)
    if reason is not None:
        logger.info("Fast prefill is off: %s.", reason)
        return
    refuse_unsupported(vllm_config)
    check_at_load()
    reason = normal_path_reason(vllm_config)
    if reason is not None:
        logger.warning("Fast prefill is off, prompts take the normal path: %s.", reason)
        return

    if not isinstance(model, HpuGemma4Model):  # a text-only checkpoint, whose class the plugin does not override
        apply_hpu_gemma4_patches(language_model)
    model.__class__ = HpuGemma4FastPrefillModel
    first = len(model.layers) - language_model.config.num_kv_shared_layers
    for layer in islice(model.layers, first, None):
        layer.self_attn.attn.attn_backend = HpuSharedKVAttentionBackend
        layer.self_attn.attn.impl.__class__ = HpuSharedKVAttentionImpl
    last_token_layers = LastTokenLayers(model, first)
    model.last_token_layers = torch.nn.ModuleList([last_token_layers])
    mark_passes_read_at_several_rows()
    logger.info(
        "Fast prefill is on: layers %d-%d, which read the KV cache of layers %s, run on the last token of each prompt.",
        first,
        len(model.layers) - 1,
        " and ".join(str(extract_layer_index(target)) for target in last_token_layers.readers),
    )


def _disable_upstream_fast_prefill(model: Any) -> None:
    """Send ``Gemma4Model.forward`` down its normal path, and free what its own fast prefill holds for CUDA graphs.

    Upstream's path asserts GPU attention metadata. Its buffers have ``max_num_batched_tokens`` rows of hidden states
    and of every layer's per-layer input.
    """
    model.fast_prefill_enabled = False
    for buffer in ("positions", "hidden_states", "per_layer_inputs"):
        if hasattr(model, buffer):
            delattr(model, buffer)


class HpuGemma4FastPrefillForConditionalGeneration(HpuGemma4ForConditionalGeneration):
    """What the model registry resolves for multimodal Gemma 4: the plugin's own class, plus fast prefill."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        enable_fast_prefill(self.language_model, vllm_config)
        # With and without the flag, the model is of the plugin's own class. vLLM's classes derived from this one (for
        # pooling) stay as they are.
        if type(self) is HpuGemma4FastPrefillForConditionalGeneration:
            self.__class__ = HpuGemma4ForConditionalGeneration


class HpuGemma4FastPrefillForCausalLM(Gemma4ForCausalLM):
    """What the model registry resolves for text-only Gemma 4, also as the language model of the multimodal one."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # The multimodal model builds this one under a prefix, and enables fast prefill itself: the plugin still has
        # to set the class of ``self.model``.
        if not prefix:
            enable_fast_prefill(self, vllm_config)
        if type(self) is HpuGemma4FastPrefillForCausalLM:
            self.__class__ = Gemma4ForCausalLM
