# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 with fast prefill: in a prompt pass the last layers run on each prompt's last token alone.

The last ``num_kv_shared_layers`` layers own no KV cache, so at a prompt token nothing reads their output, except at
the token that is sampled. Nothing but the same token of the first of them reads the output of the layer before, the
last KV producer, either: of its other tokens only the K/V are needed. In the words of vLLM's ``Gemma4Model``, the
layers that run on every token are the self-decoder, the others the cross-decoder. Follow a pass from
``HpuGemma4FastPrefillModel.forward``.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sequence import IntermediateTensors
from vllm_gaudi.extension.runtime import get_config
from vllm_gaudi.models.gemma4 import HpuGemma4ForConditionalGeneration, HpuGemma4Model
from vllm_gaudi.models.gemma4 import _hpu_run_decoder_layers as run_decoder_layers

from vllm_gaudi_ext import compat, patches
from vllm_gaudi_ext.attention.backends.hpu_attn import HpuSharedKVAttentionBackend, LastTokenMetadata
from vllm_gaudi_ext.config import Fast, Normal, Refused, decide
from vllm_gaudi_ext.ops import last_token_rows
from vllm_gaudi_ext.prompt_pass import PromptPass, fast_prompt_pass, reduced_to_rows

logger = init_logger(f"vllm.{__name__}")  # a child of the logger that vLLM configures


class TokenInputs(NamedTuple):
    """What the model is given for each token of a pass, and computes its per-layer inputs from."""

    embeds: torch.Tensor  # [tokens, hidden_size]
    input_ids: torch.Tensor | None  # [tokens], None if the embeddings were given
    per_layer_embeds: torch.Tensor | None  # those that were given with them, [tokens, num_layers, ple_dim]

    def at(self, rows: torch.Tensor) -> "TokenInputs":
        """Those of some tokens, rows [n] int64."""
        return TokenInputs(*(None if x is None else x.index_select(0, rows) for x in self))


class Region(torch.nn.Module):
    """A method of a model that the plugin compiles as one region, as it does each child of a ``ModuleList``.

    It owns no module: quantizers and weight loaders find each layer once, under the model's own name for it.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        super().__init__()
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)


class HpuGemma4FastPrefillModel(HpuGemma4Model):
    """``HpuGemma4Model`` whose prompt passes run the cross-decoder on last tokens alone."""

    verdict: Fast
    num_self_decoder_layers: int
    cross_decoder_layers: tuple[Any, ...]  # the KV-shared layers, and before them the last KV producer if it is reduced
    rotary_modules: tuple[Any, ...]  # the distinct rotary embeddings of the cross-decoder
    kv_readers: dict[str, Any]  # of each KV cache that the cross-decoder reads, by its layer's name, one attention
    regions: torch.nn.ModuleList  # get_self_decoder_inputs and run_cross_decoder

    def set_up_fast_prefill(self, verdict: Fast, num_kv_shared_layers: int) -> None:
        """Split the layers. In place of ``__init__``, since this class is given to a model that is built already.

        The parts are kept in tuples and a dict, where ``torch.nn.Module`` does not give them second names.
        """
        first_shared = len(self.layers) - num_kv_shared_layers
        self.verdict = verdict
        self.num_self_decoder_layers = first_shared - 1 if verdict.reduces_kv_producer else first_shared
        self.cross_decoder_layers = tuple(islice(self.layers, self.num_self_decoder_layers, None))
        self.rotary_modules = tuple(dict.fromkeys(layer.self_attn.rotary_emb for layer in self.cross_decoder_layers))
        self.kv_readers = {}
        for layer in self.cross_decoder_layers:
            attention = layer.self_attn.attn
            self.kv_readers.setdefault(attention.kv_sharing_target_layer_name or attention.layer_name, attention)
        self.regions = torch.nn.ModuleList([Region(self.get_self_decoder_inputs), Region(self.run_cross_decoder)])

    def forward(self,
                input_ids: torch.Tensor | None,
                positions: torch.Tensor,
                intermediate_tensors: IntermediateTensors | None,
                inputs_embeds: torch.Tensor | None = None,
                per_layer_inputs: torch.Tensor | None = None,
                **kwargs: Any) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        """As ``HpuGemma4Model.forward``.

        Args:
            input_ids: [batch * padded_len], or None with ``inputs_embeds``.
            positions: [batch, padded_len] int32, -1 for padding.
            inputs_embeds: [batch * padded_len, hidden_size].
            per_layer_inputs: per-layer embeddings of ``inputs_embeds``, [batch * padded_len, num_layers, ple_dim].

        Returns:
            [batch * padded_len, hidden_size]. In a reduced pass only the rows of the last tokens are final hidden
            states; the others are those that enter the cross-decoder, which the model runner never reads.
        """
        kv_caches = [attention.kv_cache for attention in self.kv_readers.values()]
        prompt = fast_prompt_pass(get_forward_context().attn_metadata, kv_caches, self.aux_hidden_state_layers)
        if prompt is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, per_layer_inputs,
                                   **kwargs)
        if inputs_embeds is None:
            inputs = TokenInputs(self.embed_input_ids(input_ids), input_ids, None)
        else:
            # The ids of image tokens, say, are not those of their per-layer embeddings.
            inputs = TokenInputs(inputs_embeds, None, per_layer_inputs)
        return self.fast_prefill_forward(prompt, positions, inputs, **kwargs)

    def fast_prefill_forward(self, prompt: PromptPass, positions: torch.Tensor, inputs: TokenInputs,
                             **kwargs: Any) -> torch.Tensor:
        """The self-decoder on every token, then the cross-decoder on last tokens; result as of ``forward``.

        Each region is one launch, as is each layer of the self-decoder, and so is each operator outside of them.
        """
        get_self_decoder_inputs, run_cross_decoder = self.regions
        per_layer_inputs = get_self_decoder_inputs(inputs)
        self_decoder_layers = islice(self.layers, self.num_self_decoder_layers)
        hidden_states = run_decoder_layers(self_decoder_layers, 0, positions, inputs.embeds, per_layer_inputs, **kwargs)
        return run_cross_decoder(prompt, positions, hidden_states, inputs, **kwargs)

    def get_self_decoder_inputs(self, inputs: TokenInputs) -> torch.Tensor | None:
        """The per-layer inputs of the self-decoder, as ``Gemma4Model`` computes them, from the slices of its weights.

        Returns:
            [tokens, num_self_decoder_layers or num_layers, ple_dim]; None in a model without per-layer inputs.
        """
        if not self.verdict.slices_per_layer_inputs or self.embed_tokens_per_layer is None:
            return self.get_all_per_layer_inputs(inputs)
        num_layers, ple_dim = self.num_self_decoder_layers, self.hidden_size_per_layer_input
        per_layer_embeds = inputs.per_layer_embeds
        if inputs.input_ids is not None:
            in_vocabulary = (inputs.input_ids >= 0) & (inputs.input_ids < self.vocab_size_per_layer_input)
            # The table as [vocab_size * all layers, ple_dim]: a slice of its columns may be copied before it is read.
            table = self.embed_tokens_per_layer.weight.view(-1, ple_dim)
            ids = torch.where(in_vocabulary, inputs.input_ids, 0).to(torch.int64).unsqueeze(1) * len(self.layers)
            ids = ids + torch.arange(num_layers, device=ids.device)  # [tokens, num_layers]
            per_layer_embeds = torch.nn.functional.embedding(ids, table) * self.embed_scale_per_layer
        elif per_layer_embeds is not None:
            per_layer_embeds = per_layer_embeds[:, :num_layers]
        weight = self.per_layer_model_projection.weight[:num_layers * ple_dim]
        projected = torch.nn.functional.linear(inputs.embeds, weight) * self.per_layer_projection_scale
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (-1, ple_dim)))
        return projected if per_layer_embeds is None else (projected + per_layer_embeds) * self.per_layer_input_scale

    def get_all_per_layer_inputs(self, inputs: TokenInputs) -> torch.Tensor | None:
        """The per-layer inputs of all layers, [tokens, num_layers, ple_dim]; None in a model without."""
        per_layer_embeds = inputs.per_layer_embeds
        if inputs.input_ids is not None:
            per_layer_embeds = self.get_per_layer_inputs(inputs.input_ids)
        return self.project_per_layer_inputs(inputs.embeds, per_layer_embeds)

    def run_cross_decoder(self, prompt: PromptPass, positions: torch.Tensor, hidden_states: torch.Tensor,
                          inputs: TokenInputs, **kwargs: Any) -> torch.Tensor:
        """Which rows are the last tokens, the cross-decoder and the final norm on them, and back to their rows.

        Args:
            positions: [batch, padded_len] int32.
            hidden_states: of every token, what enters the first layer, [batch * padded_len, hidden_size].
            inputs: of every token.

        Returns:
            ``hidden_states`` with final hidden states in the rows of the last tokens.
        """
        if self.verdict.reduces_kv_producer:
            self.write_kv(self.cross_decoder_layers[0], prompt, positions, hidden_states)
        rows = last_token_rows(prompt.query_lens, prompt.slot_mapping.size(1))  # [batch]
        shared_kv = {name: reader.impl.gather_shared_kv(reader.kv_cache, prompt)
                     for name, reader in self.kv_readers.items()}  # yapf: disable
        with reduced_to_rows(rows, LastTokenMetadata(shared_kv), self.rotary_modules):
            last_hidden_states = run_decoder_layers(self.cross_decoder_layers, self.num_self_decoder_layers,
                                                    positions.view(-1, 1).index_select(0, rows),
                                                    hidden_states.index_select(0, rows),
                                                    self.get_all_per_layer_inputs(inputs.at(rows)), **kwargs)
        return hidden_states.index_copy(0, rows, self.norm(last_hidden_states))

    def write_kv(self, layer: Any, prompt: PromptPass, positions: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """Write a layer's K/V of every token to its cache: ``Gemma4Attention.forward`` without the query."""
        attention = layer.self_attn
        hidden_states = layer.input_layernorm(hidden_states)
        if self.verdict.slices_qkv:
            weight, bias = attention.qkv_proj.weight[attention.q_size:], attention.qkv_proj.bias
            kv = torch.nn.functional.linear(hidden_states, weight, None if bias is None else bias[attention.q_size:])
        else:
            kv = attention.qkv_proj(hidden_states)[0][:, attention.q_size:]
        key, value = kv.chunk(2, dim=-1)
        heads = (attention.num_kv_heads, attention.head_dim)
        key = attention.k_norm(key.unflatten(-1, heads)).flatten(-2)
        value = attention.v_norm(value.unflatten(-1, heads)).flatten(-2)
        # The HPU rotary embedding cannot do without a query: the key stands in for it.
        key = attention.rotary_emb(positions, key, key)[1]
        attention.attn.impl.write_kv(key, value, attention.attn.kv_cache, prompt)


def enable_fast_prefill(language_model: Gemma4ForCausalLM, vllm_config: VllmConfig) -> None:
    """Give a constructed Gemma 4 fast prefill, if ``--kv-sharing-fast-prefill`` is on and can be honoured.

    Says in one line that it is on and for which layers, or why it is not.

    Raises:
        ValueError: for a setting that can neither be honoured nor take the normal path.
    """
    if not vllm_config.cache_config.kv_sharing_fast_prefill:
        return
    model: Any = language_model.model
    patches.disable_upstream_fast_prefill(model)
    verdict = decide(vllm_config, get_config())
    if isinstance(verdict, Refused):
        raise ValueError(verdict.message)
    if isinstance(verdict, Normal):
        logger.warning("Fast prefill is off, prompts take the normal path: %s.", verdict.reason)
        return
    if not isinstance(verdict, Fast):
        logger.info("Fast prefill is off: %s.", verdict.reason)
        return

    patches.swap_model_class(language_model, HpuGemma4FastPrefillModel)
    model.set_up_fast_prefill(verdict, language_model.config.num_kv_shared_layers)
    for layer in model.cross_decoder_layers:
        patches.swap_attention_backend(layer.self_attn.attn, HpuSharedKVAttentionBackend)
    patches.mark_passes_read_at_several_rows()
    if newer := " and ".join(compat.not_run()):
        logger.warning("vllm-gaudi-ext was not run with %s. All that it relies on was found there.", newer)
    logger.info(
        "Fast prefill is on: layers %d-%d, which read the KV cache of layers %s, run on each prompt's last token.%s",
        len(model.layers) - language_model.config.num_kv_shared_layers,
        len(model.layers) - 1, " and ".join(map(str, sorted(map(extract_layer_index, model.kv_readers)))),
        f" So does layer {model.num_self_decoder_layers}, except for its K/V." if verdict.reduces_kv_producer else "")


class HpuGemma4FastPrefillForConditionalGeneration(HpuGemma4ForConditionalGeneration):
    """What the model registry resolves for multimodal Gemma 4: the plugin's own class, plus fast prefill."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        enable_fast_prefill(self.language_model, vllm_config)
        patches.restore_class(self, HpuGemma4FastPrefillForConditionalGeneration)


class HpuGemma4FastPrefillForCausalLM(Gemma4ForCausalLM):
    """What the model registry resolves for text-only Gemma 4, also as the language model of the multimodal one."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # The multimodal model builds this one under a prefix, and enables fast prefill itself: the plugin still has
        # to set the class of ``self.model``. Other wrappers around it do not, and take the normal path.
        if not prefix:
            enable_fast_prefill(self, vllm_config)
        elif vllm_config.cache_config.kv_sharing_fast_prefill:
            patches.disable_upstream_fast_prefill(self.model)
            if vllm_config.model_config.architecture not in patches.MODELS:
                reason = f"{vllm_config.model_config.architecture} is not supported"
                logger.warning("Fast prefill is off, prompts take the normal path: %s.", reason)
        patches.restore_class(self, HpuGemma4FastPrefillForCausalLM)
