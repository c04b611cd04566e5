# SPDX-License-Identifier: Apache-2.0
"""Settings of the plugin that change what a prompt pass is made of, and a pass that raises half-way."""

import pytest
from vllm_gaudi.extension.runtime import get_config

from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.compare import assert_equal, run_off_and_on
from tests.harness.workload import SLIDING_BEFORE, Request, play, play_raising_half_way, prompt_of, tokens_of

# Environment, and what it makes of the adapter around the model and of the plugin's features.
PLUGIN_ONLY = {
    "linear buckets": ({"VLLM_BUCKETING_STRATEGY": "lin"}, {"bucketing_strategy": "lin"}),
    "padding-aware buckets": (
        {"VLLM_BUCKETING_STRATEGY": "pad", "VLLM_HPU_FSDPA_SLICE_ENABLED": "false"},
        {"bucketing_strategy": "pad", "enable_fsdpa_slicing": False},
    ),
    "no buckets": ({"VLLM_ENABLE_BUCKETING": "false"}, {"use_bucketing": False}),
}
BOTH_HOSTS = {
    "exponential buckets": ({"VLLM_BUCKETING_STRATEGY": "exp"}, {"bucketing_strategy": "exp"}),
    "naive attention": ({"VLLM_PROMPT_USE_FUSEDSDPA": "0"}, {"prompt_attn_impl": "naive_impl"}),
    # The attention kernel applies the window itself where a prompt is padded to 256 tokens or more.
    "kernel window": (
        {
            "PT_HPU_SDPA_QKV_SLICE_MODE_FWD": "true",
            "PT_HPU_SDPA_BC_FACTOR": "128",
            "VLLM_FUSEDSDPA_SLIDE_THLD": "256",
        },
        {},
    ),
    "cos and sin computed in each layer": ({"VLLM_COS_SIN_RECOMPUTE": "true"}, {"recompute_cos_sin": True}),
}
SETTINGS = BOTH_HOSTS | PLUGIN_ONLY
WINDOW = 128


def prompts(llm):
    return tokens_of(play(llm, [Request(prompt_of(n)) for n in (1, 100, 128, 129, 300, 700)]))


def prefix_hit(llm):
    return [tokens_of(play(llm, [Request([*prompt_of(300), *prompt_of(20, seed)])])) for seed in (1, 2)]


def raising_half_way(llm):
    return tokens_of(play_raising_half_way(llm, [Request(prompt_of(n)) for n in (150, 7)]))


SCENARIOS = {scenario.__name__: scenario for scenario in (prompts, prefix_hit, raising_half_way)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), sliding_window=WINDOW, **SLIDING_BEFORE)


@pytest.fixture(scope="module")
def settings(request):
    return request.param


@pytest.fixture(scope="module")
def outcomes(settings, checkpoint):
    env, effect = SETTINGS[settings]
    scenarios = dict(SCENARIOS)

    def in_effect(llm):
        adapter, features = engine.runner_of(llm).model, get_config()
        owners = {name: adapter if hasattr(adapter, name) else features for name in effect}
        return {name: getattr(owner, name) for name, owner in owners.items()} == effect

    scenarios["in effect"] = in_effect
    if settings == "naive attention":  # the plugin itself cannot do that
        del scenarios["prefix_hit"]
    return run_off_and_on(checkpoint, scenarios, prompt_batch_cap=4, env=env)


def on_settings(*names):
    params = [pytest.param(name, marks=pytest.mark.plugin_only) if name in PLUGIN_ONLY else name for name in names]
    return pytest.mark.parametrize("settings", params, indirect=True, scope="module")


@on_settings(*SETTINGS)
def test_prompts(settings, outcomes):
    off, on = outcomes["prompts"]
    assert_equal(off, on)
    assert outcomes["in effect"][1].result
    windows = {p.padded_len: dict(p.graph_key)["window_attn_bias"] for p in on.prompt_passes}
    by_kernel = {length for length, mask in windows.items() if mask is None}
    assert by_kernel == ({length for length in windows if length >= 256} if settings == "kernel window" else set())


@on_settings(*(name for name in SETTINGS if name != "naive attention"))
def test_prefix_hit(outcomes):
    off, on = outcomes["prefix_hit"]
    assert_equal(off, on)
    assert [(256, 320)] in [p.spans() for p in on.prompt_passes]


@on_settings("exponential buckets", "cos and sin computed in each layer")
def test_pass_that_raises_leaves_what_was_prepared(outcomes):
    assert_equal(*outcomes["raising_half_way"])
