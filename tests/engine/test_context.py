# SPDX-License-Identifier: Apache-2.0
"""Prompts with cached context: prefix hits, chunks, scattered blocks, and passes read at several rows."""

from contextlib import contextmanager

import pytest
import torch

from tests import hosts
from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.compare import assert_equal, run_off_and_on
from tests.harness.workload import BLOCK, FULL_BEFORE, SLIDING_BEFORE, Request, play, prompt_of, tokens_of

ASYNC, SYNC = "window 128, chunks of 256, async", "window 256, chunks of 200, sync"
CONTIGUOUS, TEXT_ONLY = "contiguous paged attention, no prefix caching", "text-only"
MULTIMODAL = "multimodal input enabled"
SETTINGS = {  # of the checkpoint, and of the engine
    ASYNC: (FULL_BEFORE, {"max_num_batched_tokens": 256, "async_scheduling": True}),
    SYNC: (SLIDING_BEFORE | {"sliding_window": 256}, {"max_num_batched_tokens": 200, "async_scheduling": False}),
    CONTIGUOUS: (
        FULL_BEFORE | {"sliding_window": 256},
        {"max_num_batched_tokens": 256, "enable_prefix_caching": False, "env": {"VLLM_CONTIGUOUS_PA": "true"}},
    ),
    TEXT_ONLY: (
        SLIDING_BEFORE | {"architecture": "Gemma4ForCausalLM"},
        {"max_num_batched_tokens": 256, "env": {"VLLM_FLATTEN_INPUT": "1"}},
    ),
    # vLLM's default: text, too, comes as embeddings. The plugin then cannot do batches of prompts.
    MULTIMODAL: (FULL_BEFORE, {"max_num_batched_tokens": 256, "limit_mm_per_prompt": {}, "prompt_batch_cap": 1}),
}


def prefix_hits(llm):
    prompt = prompt_of(300)
    prompts = [
        prompt,
        prompt,
        [*prompt[: 2 * BLOCK], *prompt_of(70, 1)],
        [*prompt[: 2 * BLOCK], *prompt_of(BLOCK, 2)],
        prompt[: 2 * BLOCK + 1],  # cached but for its last token
        prompt[: 2 * BLOCK],  # all cached: vLLM computes the last block again
    ]
    return [tokens_of(play(llm, [Request(p)])) for p in prompts]


def chunks_of_one(llm):
    return tokens_of(play(llm, [Request(prompt_of(700, 3))]))


def chunks_of_several(llm):
    """Next to decodes, a prompt gets the rest of the step's budget, and so a bound within a block."""
    return tokens_of(play(llm, [Request(prompt_of(n, 4)) for n in (700, 30, 513, 256, 257, 450)]))


def scattered_blocks(llm):
    """Requests of different lengths finish out of order, and the later ones get the blocks that they leave."""
    first = [Request(prompt_of(n, 5), max_tokens=m) for n, m in ((130, 9), (300, 3), (10, 12), (500, 2), (140, 6))]
    later = [Request(prompt_of(n, 6), arrives=m) for n, m in ((900, 5), (600, 7), (450, 10))]
    contiguous = {layer.self_attn.attn.impl.use_contiguous_pa for layer in engine.layers_of(llm)}
    return contiguous, tokens_of(play(llm, first + later))


@contextmanager
def reading_last_rows(llm, count):
    """The runner reads the first sequence of a prompt pass at its last `count` rows, and samples from the last.

    Yields, for each prompt pass, the logits that were read, [rows, vocabulary], or None if the pass ends no prompt.
    """
    runner = engine.runner_of(llm)
    form, execute = runner._form_prefill_batch, runner._execute_model_generic
    read = []

    def form_prefill_batch(contents):
        if contents.logits_positions and contents.logits_positions[0]:
            end = len(contents.token_ids[0])
            contents.logits_positions[0] = list(range(end - count, end))
        batch = form(contents)
        for requests in batch.logits_requests:
            del requests[: count - 1]
        return batch

    def execute_model_generic(token_ids, position_ids, attn_metadata, *args, **kwargs):
        *states, rows, logits = execute(token_ids, position_ids, attn_metadata, *args, **kwargs)
        if attn_metadata.is_prompt:
            read.append(logits.clone() if len(logits) else None)
            rows, logits = rows[count - 1 :], logits[count - 1 :]
        return *states, rows, logits

    runner._form_prefill_batch, runner._execute_model_generic = form_prefill_batch, execute_model_generic
    try:
        yield read
    finally:
        del runner._form_prefill_batch, runner._execute_model_generic


def read_at_one_row(llm):
    together = tokens_of(play(llm, [Request(prompt_of(n, 7)) for n in (40, 77)]))
    return together, tokens_of(play(llm, [Request(prompt_of(300, 7))]))


def read_at_three_rows(llm):
    with reading_last_rows(llm, 3) as logits:
        tokens = read_at_one_row(llm)
    return tokens, logits


SCENARIOS = {
    "prefix hits": prefix_hits,
    "chunks of one": chunks_of_one,
    "chunks of several": chunks_of_several,
    "scattered blocks": scattered_blocks,
    "read at one row": read_at_one_row,
}
if hosts.name() == "plugin":
    SCENARIOS["read at three rows"] = read_at_three_rows


@pytest.fixture(scope="module")
def settings(request):
    return request.param


@pytest.fixture(scope="module")
def outcomes(settings, tmp_path_factory):
    layers, engine_args = SETTINGS[settings]
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **layers)
    return run_off_and_on(checkpoint, SCENARIOS, **{"prompt_batch_cap": 4} | engine_args)


def on_settings(*names):
    return pytest.mark.parametrize("settings", names, indirect=True, scope="module")


@on_settings(ASYNC, SYNC, TEXT_ONLY, MULTIMODAL)
def test_prefix_hits(outcomes):
    off, on = outcomes["prefix hits"]
    assert_equal(off, on)
    hits = [p.spans() for p in on.prompt_passes if p.context_lens[0]]
    for hit in [(256, 300), (256, 326), (256, 384), (256, 257), (128, 256)]:
        assert [hit] in hits


@on_settings(*SETTINGS)
def test_chunks_of_one(settings, outcomes):
    off, on = outcomes["chunks of one"]
    assert_equal(off, on)
    bounds = [0, 200, 400, 600, 700] if settings == SYNC else [0, 256, 512, 700]
    assert [p.spans() for p in on.prompt_passes] == [[span] for span in zip(bounds, bounds[1:], strict=False)]


@on_settings(*SETTINGS)
def test_chunks_of_several(outcomes):
    off, on = outcomes["chunks of several"]
    assert_equal(off, on)
    assert any(start % BLOCK for p in on.prompt_passes for start, _ in p.spans())


@on_settings(*SETTINGS)
def test_scattered_blocks(settings, outcomes):
    off, on = outcomes["scattered blocks"]
    assert_equal(off, on)
    assert on.result[0] == {settings == CONTIGUOUS}
    contexts = [p.context_blocks for p in on.prompt_passes if p.context_blocks]
    assert any(b > a + 1 for blocks in contexts for a, b in zip(blocks, blocks[1:], strict=False))
    assert any(b < a for blocks in contexts for a, b in zip(blocks, blocks[1:], strict=False))


@pytest.mark.plugin_only
@on_settings(ASYNC, SYNC)
def test_pass_read_at_several_rows_takes_the_normal_path(settings, outcomes):
    off, on = outcomes["read at three rows"]
    assert on.result[0] == off.result[0] == outcomes["read at one row"][1].result
    # The two short prompts fit into one pass of 256 tokens, and the second is read at one row.
    assert {len(rows) for rows in on.result[1] if rows is not None} == ({3, 4} if settings == ASYNC else {3})
    for whole, now, expected, rows in zip(
        off.prompt_passes, on.prompt_passes, off.result[1], on.result[1], strict=True
    ):
        if rows is None:
            assert now.rows[-1] == len(now.query_lens)
        else:
            assert now.rows == whole.rows
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.plugin_only
@on_settings(ASYNC, SYNC)
def test_graph_key_tells_how_a_pass_is_read(outcomes):
    """Else a graph that was captured of one kind of pass would be replayed for the other."""
    one, three = outcomes["read at one row"][1], outcomes["read at three rows"][1]
    assert_equal(*outcomes["read at one row"])
    assert [p.schedule()[:-1] for p in one.passes] == [p.schedule()[:-1] for p in three.passes]
    for at_one, at_three, rows in zip(one.prompt_passes, three.prompt_passes, three.result[1], strict=True):
        assert (at_one.graph_key == at_three.graph_key) == (rows is None)
