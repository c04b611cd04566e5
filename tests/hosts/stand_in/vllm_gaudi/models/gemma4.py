# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 whose layers find their per-layer input through a buffer instead of a Python integer."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import gemma4 as upstream
from vllm.model_executor.models.gemma4 import Gemma4Model
from vllm.model_executor.models.gemma4_mm import Gemma4ForConditionalGeneration
from vllm.sequence import IntermediateTensors


def _hpu_run_decoder_layers(
    decoder_layers: Iterable[Any],
    layer_idx_start: int,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    per_layer_inputs: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """hidden_states [tokens, hidden], per_layer_inputs [tokens, layers, per_layer_dim] -> [tokens, hidden]."""
    residual = None
    for layer in decoder_layers:
        per_layer_input = None
        if per_layer_inputs is not None:
            per_layer_input = torch.index_select(per_layer_inputs, 1, layer.layer_idx_tensor).squeeze(1)
        hidden_states, residual = layer(positions, hidden_states, residual, per_layer_input=per_layer_input, **kwargs)
    return hidden_states


class HpuGemma4Model(Gemma4Model):
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        per_layer_inputs: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert intermediate_tensors is None, "the stand-in has no pipeline parallelism"
        if self.fast_prefill_enabled:
            return self.norm(self.fast_prefill_forward(input_ids, positions, inputs_embeds, per_layer_inputs, **kwargs))
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
            per_layer_inputs = self.get_per_layer_inputs(input_ids)
        per_layer_inputs = self.project_per_layer_inputs(inputs_embeds, per_layer_inputs)
        layers = self.layers[self.start_layer : self.end_layer]
        return self.norm(_hpu_run_decoder_layers(layers, 0, positions, inputs_embeds, per_layer_inputs, **kwargs))


def _apply_hpu_gemma4_patches(language_model: Any) -> None:
    """Swap the class of `language_model.model` in place and give each layer its index as a buffer."""
    language_model.model.__class__ = HpuGemma4Model
    for index, layer in enumerate(language_model.model.layers):
        layer.register_buffer("layer_idx_tensor", torch.tensor([index]), persistent=False)
    upstream._run_decoder_layers = _hpu_run_decoder_layers


class HpuGemma4ForConditionalGeneration(Gemma4ForConditionalGeneration):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _apply_hpu_gemma4_patches(self.language_model)
