# SPDX-License-Identifier: Apache-2.0
"""FP8 KV cache, embeddings as input, and drafting, on the real plugin: equal to the same engine without the flag."""

import pytest
import torch
from vllm import SamplingParams, TokensPrompt

from tests.harness import engine
from tests.harness.record import count_rows
from tests.harness.workload import prompt_of

pytestmark = pytest.mark.plugin_only

LENGTHS = [5, 40, 128, 130, 300]


def shared_rows(passes):
    """Rows that the last layer saw in the prompt passes."""
    return [rows[-1] for rows in passes if rows[0] >= 128]


def test_fp8_kv_cache(e2b):
    tokens = {}
    for fast in (False, True):
        llm = engine.make_llm(
            e2b, fast=fast, dtype="bfloat16", kv_cache_dtype="fp8_inc", prompt_batch_cap=4, enable_prefix_caching=False
        )
        with count_rows(llm) as passes:
            tokens[fast] = engine.generate(llm, [prompt_of(n) for n in LENGTHS], max_tokens=4)
        assert all(keys.dtype == torch.float8_e4m3fn for keys, _ in engine.kv_cache_of(llm))
        engine.close(llm)
    assert set(shared_rows(passes)) <= {1, 4}
    assert tokens[True] == tokens[False]


def first_token_of_chunked_prompt(checkpoint, **settings):
    """Its logprob, and the prompt passes' rows of the last layer."""
    llm = engine.make_llm(checkpoint, dtype="bfloat16", max_num_batched_tokens=256, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    try:
        with count_rows(llm) as passes:
            (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt_of(700))], params, use_tqdm=False)
    finally:
        engine.close(llm)
    (logprobs,) = output.outputs[0].logprobs
    return max((entry.logprob, token) for token, entry in logprobs.items()), shared_rows(passes)


def test_fp8_kv_cache_with_context(e2b):
    """The plugin itself cannot do that on a CPU: compared is a cache that is not quantized."""
    with pytest.raises(RuntimeError, match="Promotion for Float8"):
        first_token_of_chunked_prompt(e2b, fast=False, kv_cache_dtype="fp8_inc")
    (logprob, token), rows = first_token_of_chunked_prompt(e2b, fast=True, kv_cache_dtype="fp8_inc")
    (expected_logprob, expected_token), _ = first_token_of_chunked_prompt(e2b, fast=False)
    assert token == expected_token
    # The rounding of an FP8 cache, and of bfloat16: 0.1 to 0.24 on the CPUs that were tried.
    assert logprob == pytest.approx(expected_logprob, abs=0.3)
    assert rows == [1, 1, 1]


def with_image_embeddings(llm, positions):
    """Have the runner put random embeddings at `positions` of each prompt pass, as it does with those of an image."""
    runner = engine.runner_of(llm)
    gather = runner._gather_mm_embeddings

    def gather_mm_embeddings(*args, **kwargs):
        embeddings, is_embedding = gather(*args, **kwargs)
        assert not embeddings
        is_embedding = torch.zeros_like(is_embedding)
        is_embedding[positions] = True
        width = runner.model_config.get_hidden_size()
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(len(positions), width, generator=generator)], is_embedding

    runner._gather_mm_embeddings = gather_mm_embeddings


def embeddings_run(checkpoint, *, fast, image, cap=1):
    llm = engine.make_llm(
        checkpoint, fast=fast, prompt_batch_cap=cap, limit_mm_per_prompt={}, enable_prefix_caching=False
    )
    if image:
        with_image_embeddings(llm, list(range(2, 5)))
    try:
        with count_rows(llm) as passes:
            return engine.generate(llm, [prompt_of(n) for n in LENGTHS], max_tokens=4), passes
    finally:
        engine.close(llm)


def test_embeddings_as_input(e2b):
    """The branch of multimodal requests: the runner embeds the prompt, and hands in its per-layer inputs."""
    text, _ = embeddings_run(e2b, fast=True, image=False)
    off, _ = embeddings_run(e2b, fast=False, image=True)
    on, passes = embeddings_run(e2b, fast=True, image=True)
    assert on == off
    assert on != text
    assert shared_rows(passes) == [1] * len(LENGTHS)


def test_embeddings_above_cap_1_fail_as_on_the_stock_plugin(e2b):
    errors = []
    for fast in (False, True):
        with pytest.raises(Exception) as error:
            embeddings_run(e2b, fast=fast, image=False, cap=4)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_ngram_drafting(e2b):
    """One request at a time: in mixed batches the stock plugin is wrong by itself."""
    drafter = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    phrase = prompt_of(20)
    prompts = [phrase * 4, phrase * 12 + prompt_of(7)]
    tokens = {}
    for fast in (False, True):
        llm = engine.make_llm(e2b, fast=fast, speculative_config=drafter)
        with count_rows(llm) as passes:
            tokens[fast] = [engine.generate(llm, [prompt], max_tokens=24)[0] for prompt in prompts]
        engine.close(llm)
    assert tokens[True] == tokens[False]
    assert shared_rows(passes) == [1] * len(prompts)
    decode_rows = [rows[0] for rows in passes if rows[0] < 128]
    assert max(decode_rows) > 1, "no draft was verified"
