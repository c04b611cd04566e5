# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens equal those without the flag and transformers' first token; KV-shared layers saw one row a prompt."""

import os

import pytest
import torch
from vllm.forward_context import get_forward_context

from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.compare import reference_first_tokens
from tests.harness.record import count_rows
from tests.harness.workload import BLOCK, prompts_of

LENGTHS = [1, 2, 127, 128, 129, 130, 255, 256, 257, 300, 700, 991]


def prompt_passes(passes):
    """Without the decode passes: a batch of at most 16 single tokens."""
    return [rows for rows in passes if rows[0] >= BLOCK]


# Whether the last layer with a KV cache of its own is reduced. All cases may be run under either value.
REDUCE = "VLLM_GAUDI_EXT_REDUCE_KV_PRODUCER"
PLAIN, REDUCED = {REDUCE: "0"}, {REDUCE: "1"}

CASES = {
    "E2B, cap 1": ("E2B", "Gemma4ForConditionalGeneration", 128, 1, {}),
    "E2B, cap 4": ("E2B", "Gemma4ForConditionalGeneration", 128, 4, {}),
    "E2B, cap 8": ("E2B", "Gemma4ForConditionalGeneration", 128, 8, {}),
    "E2B, cap 4, whole KV producer": ("E2B", "Gemma4ForConditionalGeneration", 128, 4, PLAIN),
    "E4B, window of two blocks, cap 4": ("E4B", "Gemma4ForConditionalGeneration", 256, 4, {}),
    "E2B text-only, cap 4": ("E2B", "Gemma4ForCausalLM", 128, 4, {}),
    "E4B text-only, cap 1": ("E4B", "Gemma4ForCausalLM", 128, 1, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_on_equals_off_and_reference(case, tmp_path):
    shape, architecture, window, cap, env = CASES[case]
    checkpoint = make_checkpoint(tmp_path, shape=shape, architecture=architecture, sliding_window=window)
    prompts = prompts_of(LENGTHS)
    if architecture == "Gemma4ForCausalLM":
        env = env | {"VLLM_FLATTEN_INPUT": "1"}
    tokens, passes = {}, {}
    for fast in (False, True):
        llm = engine.make_llm(checkpoint, fast=fast, prompt_batch_cap=cap, env=env)
        with count_rows(llm) as passes[fast]:
            tokens[fast] = engine.generate(llm, prompts, max_tokens=32)
        own_kv = [not layer.self_attn.is_kv_shared_layer for layer in engine.layers_of(llm)]
        engine.close(llm)

    assert tokens[True] == tokens[False]
    assert len({tuple(t) for t in tokens[True]}) == len(LENGTHS), "a degenerate model would hide differences"
    assert [t[0] for t in tokens[True]] == reference_first_tokens(checkpoint, prompts)

    off, on = prompt_passes(passes[False]), prompt_passes(passes[True])
    assert len(off) == len(on)
    batches = set()
    for whole, reduced in zip(off, on, strict=True):
        assert set(whole) == {reduced[0]}
        batch = reduced[-1]
        batches.add(batch)
        whole_layers = sum(own_kv) - (env.get(REDUCE, os.environ.get(REDUCE)) != "0")
        assert reduced == whole[:whole_layers] + [batch] * (len(own_kv) - whole_layers)
        assert reduced[0] % (batch * BLOCK) == 0
    assert max(batches) <= cap
    assert (max(batches) > 1) == (cap > 1)


@pytest.fixture(scope="module")
def fast_llm(e2b):
    # Without prefix caching: what a prompt of a second run reads would be context, under the plugin's context mask.
    llm = engine.make_llm(e2b, fast=True, prompt_batch_cap=4, enable_prefix_caching=False)
    yield llm
    engine.close(llm)


def test_other_rows_are_never_read(fast_llm):
    """Fill the rows of a prompt pass that are not last tokens with NaN: nothing changes."""
    prompts = prompts_of([5, 40, 200])
    expected = engine.generate(fast_llm, prompts)
    poisoned = []

    def poison(module, args, hidden_states):
        metadata = get_forward_context().attn_metadata
        if not metadata.is_prompt:
            return None
        lens, padded_len = metadata.seq_lens_tensor.tolist(), metadata.slot_mapping.shape[1]
        last = [i * padded_len + length - 1 for i, length in enumerate(lens) if length]
        poisoned.append(len(hidden_states) - len(last))
        result = torch.full_like(hidden_states, float("nan"))
        result[last] = hidden_states[last]
        return result

    hook = engine.model_of(fast_llm).register_forward_hook(poison)
    try:
        assert engine.generate(fast_llm, prompts_of([5, 40, 200])) == expected
    finally:
        hook.remove()
    assert sum(poisoned) > 0


def test_padding_rows_are_finite(fast_llm):
    """Three prompts in a bucket of four."""
    outputs = []

    def record(module, args, hidden_states):
        if get_forward_context().attn_metadata.is_prompt:
            outputs.append(hidden_states)

    hook = engine.model_of(fast_llm).register_forward_hook(record)
    try:
        with count_rows(fast_llm) as passes:
            engine.generate(fast_llm, prompts_of([5, 40, 200]))
    finally:
        hook.remove()
    assert passes[0][-1] == 4
    assert outputs
    assert all(torch.isfinite(hidden_states).all() for hidden_states in outputs)


def test_kv_cache_is_bit_equal_and_shared_layers_never_write(e2b):
    prompts = prompts_of([5, 128, 300])
    caches, writes = [], []
    for fast in (False, True):
        llm = engine.make_llm(e2b, fast=fast, prompt_batch_cap=4)
        for layer in engine.layers_of(llm):
            if layer.self_attn.is_kv_shared_layer:
                for cache in (layer.self_attn.attn.impl.k_cache, layer.self_attn.attn.impl.v_cache):
                    cache.register_forward_pre_hook(lambda module, args: writes.append(module))
        engine.generate(llm, prompts, max_tokens=1)
        caches.append([[kv.clone() for kv in layer] for layer in engine.kv_cache_of(llm)])
        engine.close(llm)
    off, on = caches
    assert sum(int(kv.any(-1).any(-1).sum()) for kv in off[0]) >= 2 * (5 + 128 + 300)
    for layer_off, layer_on in zip(off, on, strict=True):
        for kv_off, kv_on in zip(layer_off, layer_on, strict=True):
            # The pad block takes the padding's slots in any order.
            assert torch.equal(kv_off[:-BLOCK], kv_on[:-BLOCK])
    assert not writes


@pytest.mark.parametrize(("env", "rows"), [(PLAIN, [128, 128, 1, 1]), (REDUCED, [128, 1, 1, 1])])
def test_four_layers_of_which_two_shared(env, rows, tmp_path):
    """A 5-token prompt, padded to one block; the second layer is the last that has a KV cache of its own."""
    types = ["sliding_attention", "full_attention"] * 2
    checkpoint = make_checkpoint(tmp_path, num_layers=4, num_kv_shared_layers=2, layer_types=types)
    llm = engine.make_llm(checkpoint, fast=True, env=env)
    with count_rows(llm) as passes:
        engine.generate(llm, prompts_of([5]), max_tokens=2)
    engine.close(llm)
    assert passes == [rows, [1, 1, 1, 1]]


def test_linear_layers_of_the_kv_producer(e2b):
    """Of 300 tokens, padded to 384: K and V of all, query, output and MLP of the last."""
    rows = {}

    def record(name):
        return lambda module, args: rows.setdefault(name, []).append(args[0].shape[0])

    llm = engine.make_llm(e2b, fast=True, env=REDUCED)
    layer = engine.layers_of(llm)[4]
    assert not layer.self_attn.is_kv_shared_layer
    assert engine.layers_of(llm)[5].self_attn.is_kv_shared_layer
    for name in ("self_attn.q_norm", "self_attn.k_norm", "self_attn.v_norm", "self_attn.o_proj", "mlp.gate_up_proj"):
        layer.get_submodule(name).register_forward_pre_hook(record(name))
    engine.generate(llm, prompts_of([300]), max_tokens=1)
    engine.close(llm)
    padded_len = max(rows["self_attn.k_norm"])
    assert padded_len >= 300
    assert rows == {
        "self_attn.q_norm": [1],
        "self_attn.k_norm": [padded_len, 1],  # the layer on the last token has its K/V once more, which nothing reads
        "self_attn.v_norm": [padded_len, 1],
        "self_attn.o_proj": [1],
        "mlp.gate_up_proj": [1],
    }
