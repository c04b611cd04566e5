# SPDX-License-Identifier: Apache-2.0
"""Requests that meet: arriving late, sampled several times, stopped, aborted, preempted; and what sampling reads."""

import re

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests import hosts
from tests.harness.checkpoints import make_checkpoint
from tests.harness.compare import assert_equal, assert_reduced, run_off_and_on
from tests.harness.workload import FULL_BEFORE, Request, play, prompt_of, tokens_of

CHUNK = 256
REGEX = "[a-f]{3}-[0-9]{2}"
CHOICE = ["left", "right"]
ABORTED = 900
PREEMPTED = 300
HOT = 2.0  # the checkpoint's choices are clear


def staggered(llm):
    arrivals = ((300, 0), (40, 2), (130, 3), (5, 3), (700, 6), (256, 7))
    return tokens_of(play(llm, [Request(prompt_of(n), arrives=at, max_tokens=10) for n, at in arrivals]))


def several_samples(llm):
    sampling = {"n": 3, "seed": 7, "temperature": HOT}
    requests = [Request(prompt_of(200), max_tokens=8, sampling=sampling), Request(prompt_of(90))]
    return tokens_of(play(llm, requests))


def seeded(llm):
    sampled = [{"temperature": HOT, "seed": seed, "top_p": 0.9} for seed in (1, 2)]
    requests = [Request(prompt_of(150), max_tokens=8, sampling=s) for s in (*sampled, {})]
    return [tokens[0] for tokens in tokens_of(play(llm, requests))]


def stop_tokens(llm):
    [[unstopped]] = tokens_of(play(llm, [Request(prompt_of(140), max_tokens=12)]))
    requests = [Request(prompt_of(140), max_tokens=12, sampling={"stop_token_ids": [unstopped[at]]}) for at in (0, 5)]
    outputs = [output.outputs[0] for output in play(llm, [*requests, Request(prompt_of(30))])]
    return unstopped, [(list(o.token_ids), o.finish_reason) for o in outputs]


def aborted(llm):
    requests = [
        Request(prompt_of(60), max_tokens=6),
        Request(prompt_of(ABORTED), aborted=2),
        Request(prompt_of(310), arrives=4),
    ]
    return tokens_of(play(llm, requests))


def structured(llm):
    """One at a time: a grammar is compiled in a thread, so that the step in which its request starts is not fixed."""
    constraints = ({"regex": REGEX}, {"choice": CHOICE})
    sampling = [{"structured_outputs": StructuredOutputsParams(**c), "ignore_eos": False} for c in constraints]
    requests = [Request(prompt_of(n), max_tokens=8, sampling=s) for n, s in zip((40, 300), sampling, strict=True)]
    outputs = [play(llm, [request]) for request in requests]
    return [output.outputs[0].text for [output] in outputs], [tokens_of(o) for o in outputs]


def logprobs(llm):
    requests = [Request(prompt_of(n), max_tokens=6, sampling={"logprobs": 5}) for n in (1, 129, 400)]
    outputs = [output.outputs[0] for output in play(llm, requests)]
    return [
        [(token, {t: p.logprob for t, p in at.items()}) for token, at in zip(o.token_ids, o.logprobs, strict=True)]
        for o in outputs
    ]


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (staggered, several_samples, seeded, stop_tokens, aborted, structured, logprobs)
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **FULL_BEFORE)


@pytest.fixture(scope="module")
def outcomes(checkpoint):
    settings = {"max_num_batched_tokens": CHUNK, "enable_prefix_caching": False}
    return run_off_and_on(checkpoint, SCENARIOS, prompt_batch_cap=4, **settings)


def test_staggered_arrivals(outcomes):
    """Each prompt's passes come between the decodes of those before it."""
    off, on = outcomes["staggered"]
    assert_equal(off, on)
    kinds = "".join("p" if p.is_prompt else "d" for p in on.passes)
    assert len(re.findall("d(?=p+d)", kinds)) >= 4


def test_several_samples(outcomes):
    off, on = outcomes["several_samples"]
    assert_equal(off, on)
    assert len({tuple(tokens) for tokens in on.result[0]}) == 3


def test_sampling_with_a_seed(outcomes):
    off, on = outcomes["seeded"]
    assert_equal(off, on)
    assert len({tuple(tokens) for tokens in on.result}) == 3


def test_stop_tokens(outcomes):
    off, on = outcomes["stop_tokens"]
    assert_equal(off, on)
    unstopped, outputs = on.result
    assert outputs[0] == (unstopped[:1], "stop")
    assert outputs[1] == (unstopped[: unstopped.index(unstopped[5]) + 1], "stop")
    assert outputs[2][1] == "length"


def test_abort_in_mid_prefill(outcomes):
    off, on = outcomes["aborted"]
    assert_equal(off, on)
    assert [tokens is None for tokens in on.result] == [False, True, False]
    ends = [end for p in on.prompt_passes for _, end in p.spans()]
    assert any(310 < end < ABORTED for end in ends)
    assert ABORTED not in ends


def test_structured_output(outcomes):
    off, on = outcomes["structured"]
    assert_equal(off, on)
    texts = on.result[0]
    assert re.fullmatch(REGEX, texts[0])
    assert texts[1] in CHOICE


def test_logprobs(outcomes):
    off, on = outcomes["logprobs"]
    assert_reduced(off, on)
    for expected, got in zip(off.result, on.result, strict=True):
        assert [token for token, _ in got] == [token for token, _ in expected]
        for (token, at), (_, expected_at) in zip(got, expected, strict=True):
            assert token in at
            assert at == pytest.approx(expected_at, abs=1e-4)


def preempted(llm):
    """Three requests fill a cache of nine blocks; then the first needs a fourth one, and the last has to yield."""
    prompts = (prompt_of(378), prompt_of(PREEMPTED, 1), prompt_of(PREEMPTED, 2))
    return tokens_of(play(llm, [Request(prompt, max_tokens=16) for prompt in prompts]))


def run_preempted(checkpoint, **settings):
    settings |= {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 512}
    return run_off_and_on(checkpoint, {"preempted": preempted}, **settings)["preempted"]


def resumed(outcome):
    """The passes of a resumed request: a prompt that goes on with what it had put out."""
    return [p for p in outcome.prompt_passes if any(PREEMPTED < end <= PREEMPTED + 16 for _, end in p.spans())]


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
def test_preempted_and_resumed(checkpoint, async_scheduling):
    off, on = run_preempted(checkpoint, async_scheduling=async_scheduling, enable_prefix_caching=False)
    assert_equal(off, on)
    assert resumed(on)


def test_preempted_and_resumed_with_a_prefix_hit(checkpoint):
    """The plugin reads such a pass at all rows from the end of the prompt on, and so it takes the normal path."""
    off, on = run_preempted(checkpoint, async_scheduling=True)
    assert on.result == off.result
    assert [p.schedule() for p in on.passes] == [p.schedule() for p in off.passes]
    assert all(p.context_blocks for p in resumed(on))
    assert resumed(on)
    if hosts.name() == "plugin":
        assert [p.rows for p in resumed(on)] == [p.rows for p in resumed(off)]
