# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 with fast prefill: in a prompt pass the last layers run on each prompt's last token alone.

The last ``num_kv_shared_layers`` layers own no KV cache, so at a prompt token nothing reads their output, except at
the token that is sampled. Nothing but the same token of the first of them reads the output of the layer before, the
last KV producer, either: of its other tokens only the K/V are needed. Follow a pass from
``HpuGemma4FastPrefillModel.forward``: is it eligible; in ``LastTokenLayers.forward``, which rows, and the layers on
them; then the one-row attention of ``vllm_gaudi_ext.attention.backends.hpu_attn``.
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
from vllm_gaudi_ext.config import (
    check_at_load,
    inert_reason,
    normal_path_reason,
    reduces_kv_producer,
    refuse_unsupported,
    takes_weight_rows,
)
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
from vllm_gaudi_ext.patches import MODELS, mark_passes_read_at_several_rows

logger = init_logger(f"vllm.{__name__}")  # a child of the logger that vLLM configures


class HpuGemma4FastPrefillModel(HpuGemma4Model):
    """``HpuGemma4Model`` whose prompt passes run the last layers on last tokens alone."""

    # FirstLayersInputs and LastTokenLayers; set by enable_fast_prefill. In a ModuleList, since in compile mode the
    # plugin compiles each child of one as a region.
    fast_prefill: torch.nn.ModuleList

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
            states; the others are those that enter the first layer on last tokens, which the model runner never reads.
        """
        first_layers: Any = self.fast_prefill[0]
        last_tokens: Any = self.fast_prefill[1]
        prompt = prompt_pass(get_forward_context().attn_metadata)
        # A drafter (aux_hidden_state_layers) reads hidden states of every token, and the memory profiling run comes
        # before there is a KV cache to read.
        if prompt is None or self.aux_hidden_state_layers or not last_tokens.has_kv_cache():
            return super().forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, per_layer_inputs, **kwargs
            )

        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        else:
            input_ids = None  # the ids of image tokens, say, are not those of their per-layer embeddings
        hidden_states = run_decoder_layers(
            islice(self.layers, last_tokens.first),
            0,
            positions,
            inputs_embeds,
            first_layers(inputs_embeds, input_ids, per_layer_inputs),
            **kwargs,
        )
        return last_tokens(prompt, positions, hidden_states, inputs_embeds, input_ids, per_layer_inputs, **kwargs)


class _Region(torch.nn.Module):
    """A part of a model's pass that owns none of what it works on.

    Quantizers and weight loaders walk modules by name and must find each layer once, under the model's own name for
    it: the attributes are kept where ``torch.nn.Module`` does not look for children.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.__dict__.update(attributes)


class FirstLayersInputs(_Region):
    """The per-layer inputs of the layers that run on every token.

    Computed as ``Gemma4Model.get_per_layer_inputs`` and ``project_per_layer_inputs`` do for all layers, from the rows
    of the weights that belong to these layers.
    """

    model: Any
    num_layers: int  # layers that run on every token
    leaves_out_rest: bool  # whether the other layers' are not computed: not if no rows can be taken from the weights

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        input_ids: torch.Tensor | None,
        per_layer_embeds: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """
        Args:
            inputs_embeds: [tokens, hidden_size].
            input_ids: [tokens], or None.
            per_layer_embeds: the per-layer embeddings if there are no ``input_ids``, [tokens, all layers, ple_dim].

        Returns:
            [tokens, num_layers or all layers, ple_dim]; None in a model without per-layer inputs.
        """
        model = self.model
        if not self.leaves_out_rest or model.embed_tokens_per_layer is None:
            return _per_layer_inputs(model, inputs_embeds, input_ids, per_layer_embeds)
        ple_dim = model.hidden_size_per_layer_input
        if input_ids is not None:
            known = (input_ids >= 0) & (input_ids < model.vocab_size_per_layer_input)
            # The table as [vocab_size * all layers, ple_dim]: a slice of its columns may be copied before it is read.
            table = model.embed_tokens_per_layer.weight.view(-1, ple_dim)
            rows = torch.where(known, input_ids, 0).to(torch.int64).unsqueeze(1) * len(model.layers)
            rows = rows + torch.arange(self.num_layers, device=rows.device)  # [tokens, num_layers]
            per_layer_embeds = torch.nn.functional.embedding(rows, table) * model.embed_scale_per_layer
        elif per_layer_embeds is not None:
            per_layer_embeds = per_layer_embeds[:, : self.num_layers]
        weight = model.per_layer_model_projection.weight[: self.num_layers * ple_dim]
        projected = torch.nn.functional.linear(inputs_embeds, weight) * model.per_layer_projection_scale
        projected = model.per_layer_projection_norm(projected.unflatten(-1, (-1, ple_dim)))
        if per_layer_embeds is None:
            return projected
        return (projected + per_layer_embeds) * model.per_layer_input_scale


class LastTokenLayers(_Region):
    """The layers and the final norm that run on the last token of each sequence of a prompt pass."""

    model: Any
    layers: tuple[Any, ...]  # the KV-shared layers, and before them the last KV producer if that is reduced
    norm: Any  # the model's final norm
    first: int  # index of layers[0] in the model
    producer: Any  # layers[0] if it has a KV cache of its own, to be written for every token; else None
    takes_weight_rows: bool  # whether the K/V rows can be taken from the producer's fused QKV weight
    rotary_modules: tuple[Any, ...]  # the distinct rotary embeddings of the layers
    readers: dict[str, Any]  # for each KV cache that is read, by its layer's name, one attention that reads it

    def has_kv_cache(self) -> bool:
        return all(isinstance(attention.kv_cache, tuple) for attention in self.readers.values())

    def forward(
        self,
        prompt: PromptPass,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        input_ids: torch.Tensor | None,
        per_layer_embeds: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Args:
            prompt: the pass.
            positions: [batch, padded_len] int32.
            hidden_states: what enters the first of the layers, [batch * padded_len, hidden_size].
            inputs_embeds, input_ids, per_layer_embeds: what the per-layer inputs are computed from, as in
                ``FirstLayersInputs``, of every token.

        Returns:
            ``hidden_states`` with the final hidden states in the rows of the last tokens.
        """
        if self.producer is not None:
            self._write_kv(prompt, positions, hidden_states)

        rows = last_token_rows(prompt.query_lens, prompt.slot_mapping.size(1))  # [batch]
        inputs_embeds = inputs_embeds.index_select(0, rows)
        if input_ids is not None:
            input_ids = input_ids.index_select(0, rows)
        if per_layer_embeds is not None:
            per_layer_embeds = per_layer_embeds.index_select(0, rows)
        context = get_forward_context()
        whole_pass = context.attn_metadata
        context.attn_metadata = LastTokenMetadata(
            {layer: attn.impl.gather_shared_kv(attn.kv_cache, prompt) for layer, attn in self.readers.items()}
        )
        try:
            with reduced_to_rows(self.rotary_modules, rows):
                last_hidden_states = run_decoder_layers(
                    self.layers,
                    self.first,
                    positions.view(-1, 1).index_select(0, rows),
                    hidden_states.index_select(0, rows),
                    _per_layer_inputs(self.model, inputs_embeds, input_ids, per_layer_embeds),
                    **kwargs,
                )
        finally:
            context.attn_metadata = whole_pass
        return hidden_states.index_copy(0, rows, self.norm(last_hidden_states))

    def _write_kv(self, prompt: PromptPass, positions: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Write the producer's K/V of every token to its cache: ``Gemma4Attention.forward`` without the query."""
        attention = self.producer.self_attn
        hidden_states = self.producer.input_layernorm(hidden_states)
        if self.takes_weight_rows:
            weight, bias = attention.qkv_proj.weight[attention.q_size :], attention.qkv_proj.bias
            kv = torch.nn.functional.linear(hidden_states, weight, None if bias is None else bias[attention.q_size :])
        else:
            kv = attention.qkv_proj(hidden_states)[0][:, attention.q_size :]
        key, value = kv.chunk(2, dim=-1)
        heads = (attention.num_kv_heads, attention.head_dim)
        key = attention.k_norm(key.unflatten(-1, heads)).flatten(-2)
        value = attention.v_norm(value.unflatten(-1, heads)).flatten(-2)
        # The HPU rotary embedding cannot do without a query: the key stands in for it.
        key = attention.rotary_emb(positions, key, key)[1]
        attention.attn.impl.write_kv(key, value, attention.attn.kv_cache, prompt)


def _per_layer_inputs(
    model: Any, inputs_embeds: torch.Tensor, input_ids: torch.Tensor | None, per_layer_embeds: torch.Tensor | None
) -> torch.Tensor | None:
    """The per-layer inputs of all layers, [tokens, all layers, ple_dim]; arguments as in ``FirstLayersInputs``."""
    if input_ids is not None:
        per_layer_embeds = model.get_per_layer_inputs(input_ids)
    return model.project_per_layer_inputs(inputs_embeds, per_layer_embeds)


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

    first_shared = len(model.layers) - language_model.config.num_kv_shared_layers
    first = first_shared - 1 if reduces_kv_producer(vllm_config) else first_shared
    layers = tuple(islice(model.layers, first, None))
    producer = layers[0] if first < first_shared else None
    readers: dict[str, Any] = {}
    for layer in layers:
        attention = layer.self_attn.attn
        attention.attn_backend = HpuSharedKVAttentionBackend
        attention.impl.__class__ = HpuSharedKVAttentionImpl
        readers.setdefault(attention.kv_sharing_target_layer_name or attention.layer_name, attention)
    takes_rows = takes_weight_rows(vllm_config)
    first_layers = FirstLayersInputs(
        model=model,
        num_layers=first,
        leaves_out_rest=takes_rows and producer is not None and vllm_config.parallel_config.tensor_parallel_size == 1,
    )
    last_tokens = LastTokenLayers(
        model=model,
        layers=layers,
        norm=model.norm,
        first=first,
        producer=producer,
        takes_weight_rows=takes_rows,
        rotary_modules=tuple(dict.fromkeys(layer.self_attn.rotary_emb for layer in layers)),
        readers=readers,
    )
    model.fast_prefill = torch.nn.ModuleList([first_layers, last_tokens])
    mark_passes_read_at_several_rows()
    logger.info(
        "Fast prefill is on: layers %d-%d, which read the KV cache of layers %s, run on each prompt's last token.%s",
        first_shared,
        first_shared + language_model.config.num_kv_shared_layers - 1,
        " and ".join(str(extract_layer_index(name)) for name in sorted(readers, key=extract_layer_index)),
        "" if producer is None else f" So does layer {first}, except for its K/V.",
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
        # to set the class of ``self.model``. Other wrappers around it do not, and take the normal path.
        if prefix:
            if vllm_config.cache_config.kv_sharing_fast_prefill:
                _disable_upstream_fast_prefill(self.model)
                if vllm_config.model_config.architecture not in MODELS:
                    reason = f"{vllm_config.model_config.architecture} is not supported"
                    logger.warning("Fast prefill is off, prompts take the normal path: %s.", reason)
        else:
            enable_fast_prefill(self, vllm_config)
        if type(self) is HpuGemma4FastPrefillForCausalLM:
            self.__class__ = Gemma4ForCausalLM
