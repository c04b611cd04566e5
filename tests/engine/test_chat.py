# SPDX-License-Identifier: Apache-2.0
"""Conversations over one system prompt, as a server sees them: cached prefixes, chunks, asynchronous scheduling."""

from tests.harness.checkpoints import make_checkpoint
from tests.harness.compare import assert_equal, run_off_and_on
from tests.harness.workload import BLOCK, FULL_BEFORE, Request, play, prompt_of, tokens_of

CONVERSATIONS, TURNS, SYSTEM_PROMPT, BUDGET = 8, 6, 300, 192


def chat(llm):
    """Each turn sends the conversation so far, with what the model answered, and a new message of its own length."""
    histories = [prompt_of(SYSTEM_PROMPT) for _ in range(CONVERSATIONS)]
    answers = []
    for turn in range(TURNS):
        for index, history in enumerate(histories):
            history += prompt_of(10 + (37 * index + 53 * turn) % 90, seed=1 + index)
        requests = [Request(list(h), arrives=2 * i, max_tokens=6 + i) for i, h in enumerate(histories)]
        answers.append(tokens_of(play(llm, requests)))
        for history, answer in zip(histories, answers[-1], strict=True):
            history += answer[0]
    return answers


def test_conversations(tmp_path):
    settings = {"prompt_batch_cap": 4, "max_num_batched_tokens": BUDGET, "async_scheduling": True}
    checkpoint = make_checkpoint(tmp_path, **FULL_BEFORE)
    off, on = run_off_and_on(checkpoint, {"chat": chat}, enable_prefix_caching=True, **settings)["chat"]
    assert_equal(off, on)
    spans = [span for p in on.prompt_passes for span in p.spans()]
    assert sum(end - start for start, end in spans if start) > 0
    # Each turn after the first finds most of its conversation cached, and some turn takes several chunks.
    assert sum(start >= SYSTEM_PROMPT // BLOCK * BLOCK for start, _ in spans) >= CONVERSATIONS * TURNS - 1
    assert len(spans) > CONVERSATIONS * TURNS
