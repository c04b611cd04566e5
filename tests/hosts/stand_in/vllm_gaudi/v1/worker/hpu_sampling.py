# SPDX-License-Identifier: Apache-2.0
"""What vLLM's sampler needs to know of a step's requests."""

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import make_tensor_with_pad
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_gaudi.v1.worker.hpu_passes import Request


def check_sampling_params(params: SamplingParams) -> None:
    """What would not be sampled as asked raises, which ends the engine; the plugin, too, dies of prompt_logprobs."""
    for name in ("prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "min_p", "min_tokens"):
        if getattr(params, name) or (name == "prompt_logprobs" and params.prompt_logprobs is not None):
            raise NotImplementedError(f"the stand-in does not support {name}")


def sampling_metadata(requests: list[Request], vocab_size: int) -> SamplingMetadata:
    params = [request.sampling_params for request in requests]

    def column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype)

    def used(values: torch.Tensor, unused: float) -> torch.Tensor | None:
        return None if bool((values == unused).all()) else values

    top_k = column("top_k", torch.int32)
    top_k[(top_k <= 0) | (top_k > vocab_size)] = vocab_size
    greedy = [p.temperature < 1e-5 for p in params]
    logprobs: list[Any] = [vocab_size if p.logprobs == -1 else p.logprobs for p in params if p.logprobs is not None]
    penalties = {
        "frequency_penalties": column("frequency_penalty"),
        "presence_penalties": column("presence_penalty"),
        "repetition_penalties": column("repetition_penalty"),
    }
    no_penalties = all(used(v, float(k.startswith("repetition"))) is None for k, v in penalties.items())
    prompts = [request.tokens[: request.num_prompt_tokens] for request in requests]
    return SamplingMetadata(
        temperature=None if all(greedy) else column("temperature"),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=used(column("top_p"), 1.0),
        top_k=used(top_k, vocab_size),
        generators={i: r.generator for i, r in enumerate(requests) if r.generator is not None},
        max_num_logprobs=max(logprobs) if logprobs else None,
        no_penalties=no_penalties,
        prompt_token_ids=None if no_penalties else make_tensor_with_pad(prompts, vocab_size, torch.int64),
        **penalties,
        output_token_ids=[request.tokens[request.num_prompt_tokens :] for request in requests],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
