# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, the same on both hosts: make one, run requests, see what its layers did."""

import gc
import os
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, EngineArgs, SamplingParams, TokensPrompt, envs
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.plugins import load_general_plugins

from tests import hosts

_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 8192,
    "num_gpu_blocks_override": 160,
    "limit_mm_per_prompt": {"image": 0, "audio": 0, "video": 0},
    "disable_log_stats": True,
}
_before: dict[LLM, dict[str, str | None]] = {}  # the environment to return to when an engine closes


def make_llm(
    model_dir: str | Path,
    *,
    fast: bool,
    prompt_batch_cap: int = 1,
    env: dict[str, str] | None = None,
    **engine_args: Any,
) -> LLM:
    """A float32 engine with a small KV cache; `fast` is vLLM's --kv-sharing-fast-prefill.

    One engine at a time: `close` it before making the next, which also takes back `env`.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PROMPT_BS_BUCKET_MAX": str(prompt_batch_cap),
        **(env or {}),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        hosts.reset()
        llm = LLM(**{**_DEFAULTS, "model": str(model_dir), "kv_sharing_fast_prefill": fast, **engine_args})
    except BaseException:
        _restore(before)
        raise
    _before[llm] = before
    return llm


def engine_config(model: str | Path, *, fast: bool = True, **settings: Any) -> VllmConfig:
    """The configuration of an engine, checked as vLLM does before it loads anything."""
    hosts.reset()
    load_general_plugins()
    defaults = {name: _DEFAULTS[name] for name in ("dtype", "max_model_len", "limit_mm_per_prompt")}
    arguments = {**defaults, "model": str(model), "kv_sharing_fast_prefill": fast, **settings}
    return EngineArgs(**arguments).create_engine_config()


def close(llm: LLM) -> None:
    """Frees the engine and takes back its environment."""
    llm.llm_engine.engine_core.shutdown()
    _restore(_before.pop(llm))


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    envs.disable_envs_cache()
    cleanup_dist_env_and_memory()
    gc.collect()


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = 8, **sampling: Any) -> list[list[int]]:
    """The tokens that follow each prompt: greedy and exactly `max_tokens` of them unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling})
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def runner_of(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def model_of(llm: LLM) -> torch.nn.Module:
    """The model that vLLM loaded, without the runner's adapter around it."""
    return runner_of(llm).model.model


def text_model_of(llm: LLM) -> Any:
    """The stack of decoder layers with its embeddings, whichever of the two architectures the checkpoint names."""
    model: Any = model_of(llm)
    return getattr(model, "language_model", model).model


def layers_of(llm: LLM) -> list[Any]:
    return list(text_model_of(llm).layers)


def kv_cache_of(llm: LLM) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each decoder layer, [slots, kv_heads, head_size]; KV-shared layers name their target's."""
    caches = [layer.self_attn.attn.kv_cache for layer in layers_of(llm)]
    return [(cache[0], cache[1]) for cache in caches]
