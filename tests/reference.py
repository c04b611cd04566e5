# SPDX-License-Identifier: Apache-2.0
"""The oracle nobody here wrote: transformers' Gemma 4 on the same weights, eager attention, float32, no cache."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def reference_logits(path: Path | str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Per prompt, the float32 logits of all its positions: [len(prompt), vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]


def reference_first_tokens(path: Path | str, prompts: list[list[int]]) -> list[int]:
    """The token greedy decoding puts after each prompt."""
    return [int(logits[-1].argmax()) for logits in reference_logits(path, prompts)]
