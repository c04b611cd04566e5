# SPDX-License-Identifier: Apache-2.0
"""From scheduled requests to the padded tensors of one forward pass."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from vllm_gaudi.extension.runtime import get_config
from vllm_gaudi.v1.attention.backends.hpu_attn import HPUAttentionMetadataV1


@dataclass
class Request:
    req_id: str
    tokens: list[int]  # the prompt, then what was sampled so far
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed_tokens: int
    sampling_params: SamplingParams
    generator: torch.Generator | None


@dataclass
class BatchContents:
    """What one prompt pass is made of."""

    prompts: list[tuple[Request, int]]  # with the number of their tokens in this pass
    logits_positions: list[list[int]]  # per prompt, the tokens of this pass whose logits are read


@dataclass
class Pass:
    """input_ids, positions [bs, seq] int32; `sampled` are the requests whose logits row `logits_indices` names."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: HPUAttentionMetadataV1
    sampled: list[Request]
    logits_indices: torch.Tensor

    @property
    def attn_metadata(self) -> list[HPUAttentionMetadataV1]:
        return [self.metadata]


def _ceil_div(number: int, unit: int) -> int:
    return -(-number // unit)


def bucket(count: int) -> int:
    """Padded count: the next power of two by the default strategy, else the count itself."""
    if not get_config().use_bucketing or get_config().bucketing_strategy != "exp":
        return count
    return 1 << max(count - 1, 0).bit_length() if count else 0


def padded(rows: Sequence[Sequence[int]], shape: tuple[int, int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The rows as a tensor of that shape, filled up with -1."""
    out = torch.full(shape, -1, dtype=dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


class PassBuilder:
    def __init__(self, vllm_config: VllmConfig) -> None:
        text_config = vllm_config.model_config.hf_text_config
        self.block_size = vllm_config.cache_config.block_size
        self.dtype = vllm_config.model_config.dtype
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.prompt_cap = int(os.environ.get("VLLM_PROMPT_BS_BUCKET_MAX", "1"))
        self.window: int | None = getattr(text_config, "sliding_window", None)
        self.trims_window_blocks = vllm_config.model_config.hf_config.model_type == "gemma4"
        self.pad_block = 0  # set once the cache exists

    # Prompts

    def group_prompts(self, prompts: list[tuple[Request, int]], keep_partial: bool) -> list[BatchContents]:
        """Neighbours share a pass up to the cap; a prompt with context is alone in its own.

        `keep_partial`: unfinished prompts get a logits row, too.
        """
        groups: list[list[tuple[Request, int]]] = []
        for prompt in prompts:
            merged = [*groups[-1], prompt] if groups else [prompt]
            batch_size, seq_len = self._prompt_shape(merged)
            fits = len(merged) <= self.prompt_cap and batch_size * seq_len <= self.max_tokens
            if groups and fits and not any(request.num_computed_tokens for request, _ in merged):
                groups[-1] = merged
            else:
                groups.append([prompt])
        return [BatchContents(group, [self._read(*prompt, keep_partial) for prompt in group]) for group in groups]

    def _read(self, request: Request, count: int, keep_partial: bool) -> list[int]:
        """The last of the `count` tokens, if it is the request's last."""
        return [count - 1] if keep_partial or request.num_computed_tokens + count >= len(request.tokens) else []

    def _prompt_shape(self, prompts: list[tuple[Request, int]]) -> tuple[int, int]:
        blocks = max(_ceil_div(count, self.block_size) for _, count in prompts)
        # No bucket is longer than what can be scheduled at once.
        seq_blocks = max(blocks, min(bucket(blocks), self.max_tokens // self.block_size))
        return max(len(prompts), min(bucket(len(prompts)), self.prompt_cap)), seq_blocks * self.block_size

    def prompt_pass(self, contents: BatchContents) -> Pass:
        prompts = contents.prompts
        batch_size, seq_len = shape = self._prompt_shape(prompts)
        spans = [range(r.num_computed_tokens, r.num_computed_tokens + count) for r, count in prompts]
        tokens = [r.tokens[span.start : span.stop] for (r, _), span in zip(prompts, spans, strict=True)]
        slots = [
            [request.block_ids[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            for (request, _), span in zip(prompts, spans, strict=True)
        ]
        no_rows = [0] * (batch_size - len(prompts))
        metadata = HPUAttentionMetadataV1(
            is_prompt=True,
            block_size=self.block_size,
            slot_mapping=padded(slots, shape, torch.int64),
            seq_lens_tensor=torch.tensor([len(span) for span in spans] + no_rows, dtype=torch.int32),
            context_lens_tensor=torch.tensor([span.start for span in spans] + no_rows, dtype=torch.int32),
        )
        self._add_prompt_masks(metadata, prompts[0][0])
        read = [(i, position) for i, positions in enumerate(contents.logits_positions) for position in positions]
        return Pass(
            input_ids=padded(tokens, shape),
            positions=padded(spans, shape),
            metadata=metadata,
            sampled=[prompts[i][0] for i, _ in read],
            logits_indices=torch.tensor([i * seq_len + position for i, position in read], dtype=torch.int32),
        )

    def _add_prompt_masks(self, metadata: HPUAttentionMetadataV1, request: Request) -> None:
        """Additive masks [bs, 1, seq, context frame + seq]; with context, `request` is the only row."""
        seq_len = metadata.slot_mapping.shape[1]
        context = request.num_computed_tokens
        blocks = request.block_ids[: _ceil_div(context, self.block_size)]
        distance = torch.arange(seq_len).unsqueeze(1) - torch.arange(seq_len)  # query - key, both in this pass
        causal = (distance >= 0).expand(len(metadata.slot_mapping), 1, -1, -1)
        if blocks:
            metadata.block_list = padded([blocks], (1, bucket(len(blocks)))).flatten()
        if blocks or get_config().prompt_attn_impl == "naive_impl":
            assert metadata.seq_lens_tensor is not None
            real = torch.arange(seq_len) < metadata.seq_lens_tensor.view(-1, 1, 1, 1)
            past = self._past(metadata.block_list, context, seq_len) < torch.inf
            metadata.attn_bias = self._additive(past, causal & real)
        if self.window is None or (not blocks and self._kernel_window(seq_len)):
            return
        frame = metadata.block_list
        if blocks and self.trims_window_blocks:
            width = self.window // self.block_size + 1
            metadata.window_block_list = frame = padded([blocks[-width:]], (1, width)).flatten()
        # One token more than the window: so it is in the plugin, and only for the past.
        past = self._past(frame, context, seq_len) <= self.window
        metadata.window_attn_bias = self._additive(past, causal & (distance < self.window))

    def _past(self, frame: torch.Tensor | None, context: int, seq_len: int) -> torch.Tensor:
        """query - key over the gathered context blocks, infinite for what is not context: [seq, frame]."""
        size = 0 if frame is None else len(frame) * self.block_size
        start = max(_ceil_div(context, self.block_size) * self.block_size - size, 0)
        keys = start + torch.arange(size)
        distance = context + torch.arange(seq_len).unsqueeze(1) - keys
        return torch.where(keys < context, distance.float(), torch.inf)

    def _additive(self, past: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        visible = torch.cat((past.expand(*current.shape[:-1], -1), current), dim=-1)
        return torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, -torch.inf)

    def _kernel_window(self, seq_len: int) -> bool:
        """Whether the attention kernel applies the window itself, without a mask."""
        slices = os.environ.get("PT_HPU_SDPA_QKV_SLICE_MODE_FWD", "").lower() in ("1", "true")
        unit = int(os.environ.get("PT_HPU_SDPA_BC_FACTOR", "1024"))
        return slices and seq_len >= int(os.environ.get("VLLM_FUSEDSDPA_SLIDE_THLD", "8192")) and seq_len % unit == 0

    # Decodes

    def decode_pass(self, requests: list[Request]) -> Pass:
        batch_size = bucket(len(requests))
        padding = batch_size - len(requests)
        positions = [request.num_computed_tokens for request in requests]
        input_ids = [[r.tokens[p]] for r, p in zip(requests, positions, strict=True)]
        tables = [r.block_ids[: p // self.block_size + 1] for r, p in zip(requests, positions, strict=True)]
        usage = [p % self.block_size + 1 for p in positions]
        slots = [table[-1] * self.block_size + used - 1 for table, used in zip(tables, usage, strict=True)]
        slots += [self.pad_block * self.block_size + i % self.block_size for i in range(padding)]
        fields = self._blocks(tables, usage, batch_size)
        if self.window is not None:
            # Whole blocks: so it is in the plugin.
            window_tables = [table[-(self.window // self.block_size) :] for table in tables]
            fields |= {"window_" + k: v for k, v in self._blocks(window_tables, usage, batch_size).items()}
        return Pass(
            input_ids=torch.tensor(input_ids + [[0]] * padding, dtype=torch.int32),
            positions=torch.tensor([[p] for p in positions] + [[0]] * padding, dtype=torch.int32),
            metadata=HPUAttentionMetadataV1(
                is_prompt=False,
                block_size=self.block_size,
                slot_mapping=torch.tensor(slots, dtype=torch.int64).unsqueeze(1),
                **fields,
            ),
            sampled=requests,
            logits_indices=torch.arange(len(requests), dtype=torch.int32),
        )

    def _blocks(self, tables: list[list[int]], usage: list[int], batch_size: int) -> dict[str, Any]:
        """The flat list of the rows' blocks; contiguous: block i stands at index i."""
        entries = [
            (block, row, self.block_size if i < len(table) - 1 else usage[row])
            for row, table in enumerate(tables)
            for i, block in enumerate(table)
        ]
        unused = (self.pad_block, batch_size, 1)
        if get_config().use_contiguous_pa:
            by_block = {entry[0]: entry for entry in entries}
            size = min(bucket(max(by_block) + 1), self.pad_block + 1)
            entries = [by_block.get(block, unused) for block in range(size)]
        else:
            entries += [unused] * (bucket(len(entries)) - len(entries))
        block_list, block_groups, block_usage = torch.tensor(entries, dtype=torch.int64).unbind(1)
        masked = torch.arange(self.block_size) >= block_usage.unsqueeze(1)
        return {
            "block_list": block_list,
            "block_groups": block_groups,
            "block_usage": block_usage.to(self.dtype),
            "block_mapping": (block_groups.unsqueeze(1) == torch.arange(batch_size)).to(self.dtype),
            "attn_bias": torch.zeros(masked.shape, dtype=self.dtype).masked_fill_(masked, -torch.inf),
        }
