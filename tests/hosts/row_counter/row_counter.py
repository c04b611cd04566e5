# SPDX-License-Identifier: Apache-2.0
"""Counts rows inside a server: with its folder on PYTHONPATH, vLLM loads it in each of its processes as a plugin.

To the file that `ROW_COUNT_FILE` names, each forward pass of a Gemma 4 appends a JSON object: `prompt`, whether it is a
prompt pass; `sequences`, those of the padded batch; `rows`, what the input of each decoder layer's MLP had.
"""

import functools
import json
import os
import re
from typing import Any

import torch

LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.mlp")


@functools.cache
def count_rows() -> None:
    file = os.environ.get("ROW_COUNT_FILE")
    if not file:
        return
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    original = BaseModelLoader.load_model

    @functools.wraps(original)
    def load_model(self: BaseModelLoader, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = original(self, *args, **kwargs)
        _hook_layers(model, file)
        return model

    BaseModelLoader.load_model = load_model


def _hook_layers(model: torch.nn.Module, file: str) -> None:
    from vllm.forward_context import get_forward_context

    mlps = {int(found[1]): mlp for name, mlp in model.named_modules() if (found := LAYER.fullmatch(name))}
    seen: dict[str, Any] = {}

    def record(layer: int, hidden_states: torch.Tensor) -> None:
        if layer == 0:
            metadata = get_forward_context().attn_metadata
            # None in the run that measures memory before there is a KV cache.
            prompt = metadata is not None and metadata.is_prompt
            seen.update(prompt=prompt, sequences=metadata.seq_lens_tensor.numel() if prompt else None, rows=[])
        seen["rows"].append(hidden_states.numel() // hidden_states.shape[-1])
        if layer == len(mlps) - 1:
            with open(file, "a") as lines:
                lines.write(json.dumps(seen) + "\n")

    for index, mlp in mlps.items():
        mlp.register_forward_pre_hook(lambda _, args, index=index: record(index, args[0]))
