# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention layer hands the plugin's implementation flat tensors and takes its return value."""

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention


def hpu_attention_forward(
    self: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    output_shape: torch.Size | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """query [tokens, num_heads * head_size] -> the same shape. A KV-shared layer may pass no key and value."""
    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, dict):
        metadata = metadata[self.layer_name]
    return self.impl.forward(self, query, key, value, self.kv_cache, metadata)


Attention.forward = hpu_attention_forward
