# SPDX-License-Identifier: Apache-2.0
"""The forward passes of an engine: what each is of, and which rows its layers saw."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import LLM
from vllm.forward_context import get_forward_context

from tests.harness.engine import generate, layers_of, text_model_of
from tests.harness.workload import BLOCK


@contextmanager
def count_rows(llm: LLM) -> Iterator[list[list[int]]]:
    """Records, for each forward pass, how many rows the MLP of each decoder layer saw: passes[n][layer]."""
    passes: list[list[int]] = []

    def record(index: int, rows: torch.Tensor) -> None:
        if index == 0:
            passes.append([])
        passes[-1].append(rows.numel() // rows.shape[-1])

    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, args, index=index: record(index, args[0]))
        for index, layer in enumerate(layers_of(llm))
    ]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def takes_normal_path(llm: LLM, prompts: list[list[int]]) -> bool:
    """Whether the decoder is the plugin's own, and every layer of it sees every row of each pass."""
    modules = [text_model_of(llm), *(layer.self_attn.attn.impl for layer in layers_of(llm))]
    modules += [layer.self_attn.attn.attn_backend for layer in layers_of(llm)]
    classes = [module if isinstance(module, type) else type(module) for module in modules]
    with count_rows(llm) as passes:
        generate(llm, prompts, max_tokens=2)
    assert passes
    is_whole = all(len(set(rows)) == 1 for rows in passes)
    return is_whole and not any(cls.__module__.startswith("vllm_gaudi_ext") for cls in classes)


@dataclass(eq=False)
class Pass:
    """A forward pass, as its metadata describes it and as its layers saw it."""

    is_prompt: bool
    rows: list[int] = field(default_factory=list)  # of each layer
    padded_len: int = 1
    query_lens: list[int] = field(default_factory=list)  # of a prompt pass, for each sequence, 0 for padding
    context_lens: list[int] = field(default_factory=list)
    context_blocks: list[int] = field(default_factory=list)
    last_hidden: torch.Tensor | None = None  # of a prompt pass, each real sequence's last row of the model's output
    graph_key: tuple[Any, ...] = ()  # what a captured graph is found by: shapes of tensors, other values as they are

    def schedule(self) -> tuple[Any, ...]:
        return self.is_prompt, self.padded_len, self.query_lens, self.context_lens, self.context_blocks

    def spans(self) -> list[tuple[int, int]]:
        """Of each sequence of a prompt pass: cached tokens in front of it, and tokens up to its end."""
        return [(c, c + q) for c, q in zip(self.context_lens, self.query_lens, strict=True) if q]


def _graph_key(metadata: Any) -> tuple[Any, ...]:
    fields = metadata._asdict()
    return tuple((k, tuple(v.shape) if isinstance(v, torch.Tensor) else v) for k, v in sorted(fields.items()))


@contextmanager
def record_passes(llm: LLM) -> Iterator[list[Pass]]:
    passes: list[Pass] = []

    model = text_model_of(llm)
    forward = model.forward

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        metadata = get_forward_context().attn_metadata
        now = Pass(metadata.is_prompt, graph_key=_graph_key(metadata))
        passes.append(now)
        if metadata.is_prompt:
            now.padded_len = metadata.slot_mapping.shape[1]
            now.query_lens = metadata.seq_lens_tensor.tolist()
            now.context_lens = metadata.context_lens_tensor.tolist()
            if metadata.block_list is not None:
                now.context_blocks = metadata.block_list[: -(-max(now.context_lens) // BLOCK)].tolist()
        hidden_states = forward(*args, **kwargs)
        if metadata.is_prompt:
            last = [i * now.padded_len + length - 1 for i, length in enumerate(now.query_lens) if length]
            now.last_hidden = hidden_states[last].clone()
        return hidden_states

    model.forward = recorded  # not a hook: vLLM's compilation decorator calls it without any
    try:
        with count_rows(llm) as rows:
            yield passes
    finally:
        del model.forward
    for now, seen in zip(passes, rows, strict=True):
        now.rows = seen
