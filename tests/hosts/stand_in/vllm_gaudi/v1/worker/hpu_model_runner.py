# SPDX-License-Identifier: Apache-2.0
"""Runs what vLLM's scheduler asks for: prompts in padded passes, then all decodes in one."""

import dataclasses
import os
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import MultiModalConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from vllm_gaudi.extension.runtime import clear_config, get_config
from vllm_gaudi.v1.attention.backends.hpu_attn import HPUAttentionMetadataV1
from vllm_gaudi.v1.worker.hpu_passes import BatchContents, Pass, PassBuilder, Request
from vllm_gaudi.v1.worker.hpu_sampling import check_sampling_params, sampling_metadata

_TYPE_CACHE: dict[str, Any] = {}


def trim_attn_metadata(metadata: HPUAttentionMetadataV1) -> Any:
    """The metadata as the namedtuple that reaches the layers; its type is made at the first call."""
    name = "TrimmedAttentionMetadata"
    if name not in _TYPE_CACHE:
        _TYPE_CACHE[name] = namedtuple(name, [field.name for field in dataclasses.fields(metadata)])
    return _TYPE_CACHE[name](**vars(metadata))


def takes_multimodal_input(config: MultiModalConfig | None) -> bool:
    """By Gemma 4's modalities, since where vLLM itself answers this differs between its releases."""
    if config is None:
        return False
    return config.enable_mm_embeds or any(config.get_limit_per_prompt(m) for m in ("image", "audio", "video"))


class HpuModelAdapter(torch.nn.Module):
    """The model as the runner calls it."""

    _rotary_embed_module: Any

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.model: Any = model
        self.vllm_config = vllm_config
        self.flatten_input = get_config().flatten_input
        self.recompute_cos_sin = os.environ.get("VLLM_COS_SIN_RECOMPUTE", "false").lower() in ("1", "true")
        rotary = (m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
        self._rotary_embed_module = next((m for m in rotary), None)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attn_metadata: Any, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """input_ids, positions [bs, seq]; the model gets ids [bs * seq] if input is flattened -> hidden states."""
        rotary = self._rotary_embed_module
        prepares = hasattr(rotary, "prepare_cos_sin")
        if prepares:
            rotary.prepare_cos_sin(positions, recompute_cos_sin=self.recompute_cos_sin)
        if self.flatten_input:
            input_ids = input_ids.view(-1)
        with set_forward_context(attn_metadata, self.vllm_config):
            hidden_states = self.model(input_ids=input_ids, positions=positions, inputs_embeds=inputs_embeds)
        if prepares:  # the plugin leaves them behind, too, when the pass raises
            for name in ("cos", "sin"):
                if hasattr(rotary, name):
                    delattr(rotary, name)
        return hidden_states


class HPUModelRunner:
    def __init__(self, vllm_config: VllmConfig) -> None:
        for name in ("lora_config", "speculative_config"):
            if getattr(vllm_config, name) is not None:
                raise NotImplementedError(f"the stand-in does not support {name}")
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        clear_config()
        get_config(self.model_config.hf_config.model_type, vllm_config.cache_config.enable_prefix_caching)
        self.supports_mm_inputs = takes_multimodal_input(self.model_config.multimodal_config)
        self.use_async_scheduling = bool(vllm_config.scheduler_config.async_scheduling)
        self.builder = PassBuilder(vllm_config)
        self.sampler = Sampler(logprobs_mode=self.model_config.logprobs_mode)
        self.requests: dict[str, Request] = {}
        self.model: HpuModelAdapter
        self._step: tuple[SchedulerOutput, list[Request], torch.Tensor | None]

    def load_model(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.model = HpuModelAdapter(get_model(vllm_config=self.vllm_config), self.vllm_config)

    def get_model(self) -> torch.nn.Module:
        return self.model.model

    # KV cache

    def _attention_layers(self) -> dict[str, Attention]:
        context = self.vllm_config.compilation_config.static_forward_context
        return {name: layer for name, layer in context.items() if isinstance(layer, Attention)}

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """All layers alike, whatever their window, so that they form one group; KV-shared layers have no cache."""
        return {
            name: FullAttentionSpec(
                block_size=self.builder.block_size,
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                dtype=self.model_config.dtype,
            )
            for name, layer in self._attention_layers().items()
            if layer.kv_sharing_target_layer_name is None
        }

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """One (k, v, None, None) per layer, k and v [(num_blocks + 1) * block_size, kv_heads, head_size]."""
        assert len(kv_cache_config.kv_cache_groups) == 1
        self.builder.pad_block = kv_cache_config.num_blocks
        layers = self._attention_layers()
        for name, spec in self.get_kv_cache_spec().items():
            shape = ((kv_cache_config.num_blocks + 1) * spec.block_size, spec.num_kv_heads, spec.head_size)
            layers[name].kv_cache = (*(torch.zeros(shape, dtype=spec.dtype) for _ in range(2)), None, None)
        for layer in layers.values():
            if layer.kv_sharing_target_layer_name is not None:
                layer.kv_cache = layers[layer.kv_sharing_target_layer_name].kv_cache

    # Steps

    def _update_requests(self, scheduled: SchedulerOutput) -> None:
        for req_id in scheduled.finished_req_ids:
            self.requests.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            if params is None or new.prompt_token_ids is None or new.mm_features:
                raise NotImplementedError("the stand-in takes token ids and generates text only")
            check_sampling_params(params)
            generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
            self.requests[new.req_id] = Request(
                new.req_id,
                list(new.prompt_token_ids),
                len(new.prompt_token_ids),
                list(new.block_ids[0]),
                new.num_computed_tokens,
                params,
                generator,
            )
        cached = scheduled.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            request = self.requests[req_id]
            request.num_computed_tokens = cached.num_computed_tokens[i]
            if req_id in cached.resumed_req_ids:
                request.block_ids = []
                # With asynchronous scheduling, preemption drops the token that was on its way.
                del request.tokens[request.num_prompt_tokens + cached.num_output_tokens[i] :]
            if (blocks := cached.new_block_ids[i]) is not None:
                request.block_ids += blocks[0]

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        self._update_requests(scheduled)
        counts = scheduled.num_scheduled_tokens
        if not counts:
            return EMPTY_MODEL_RUNNER_OUTPUT
        prompts, decodes = [], []
        for req_id, count in counts.items():
            request = self.requests[req_id]
            if count > 1 or request.num_computed_tokens < request.num_prompt_tokens:
                prompts.append((request, count))
            else:
                decodes.append(request)
        passes = [self._form_prefill_batch(c) for c in self.builder.group_prompts(prompts, self.use_async_scheduling)]
        if decodes:
            passes.append(self.builder.decode_pass(decodes))
        logits = [self._run(p) for p in passes]
        sampled = [request for p in passes for request in p.sampled]
        self._step = scheduled, sampled, torch.cat(logits) if sampled else None
        return None

    def _form_prefill_batch(self, contents: BatchContents) -> Pass:
        return self.builder.prompt_pass(contents)

    def _run(self, batch: Pass) -> torch.Tensor:
        """-> logits [rows, vocab] of the rows that are read."""
        inputs_embeds = None
        if self.supports_mm_inputs and batch.metadata.is_prompt:
            ids = batch.input_ids
            # Flat for a single row only, as in the plugin, where more rows then fail.
            inputs_embeds = self.model.model.embed_input_ids(ids.squeeze(0) if len(ids) == 1 else ids)
        hidden_states = self.model.forward(
            input_ids=batch.input_ids,
            positions=batch.positions,
            attn_metadata=trim_attn_metadata(batch.metadata),
            inputs_embeds=inputs_embeds,
        )
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])[batch.logits_indices]
        return self.model.model.compute_logits(hidden_states)

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        scheduled, sampled, logits = self._step
        # Requests whose prompt is not finished come last: logprobs stand in the order of the sampled ones.
        order = [*(r.req_id for r in sampled)]
        order += [req_id for req_id in scheduled.num_scheduled_tokens if req_id not in order]
        tokens: list[list[int]] = [[] for _ in order]
        logprobs = None
        if logits is not None:
            if grammar is not None:
                apply_grammar_bitmask(scheduled, grammar, SimpleNamespace(req_ids=order[: len(sampled)]), logits)
            out = self.sampler(logits, sampling_metadata(sampled, self.model_config.get_vocab_size()))
            logprobs = None if out.logprobs_tensors is None else out.logprobs_tensors.tolists()
            for row, request in enumerate(sampled):
                end = request.num_computed_tokens + scheduled.num_scheduled_tokens[request.req_id]
                if end == len(request.tokens):  # else a partial prompt's row, which is discarded
                    tokens[row] = out.sampled_token_ids[row].tolist()
                    request.tokens += tokens[row]
        return ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={req_id: i for i, req_id in enumerate(order)},
            sampled_token_ids=tokens,
            logprobs=logprobs,
        )
