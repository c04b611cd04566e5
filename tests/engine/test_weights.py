# SPDX-License-Identifier: Apache-2.0
"""Weights: others in place of those loaded, from disk and from memory, also of a sleeping engine; none for the K/V of
KV-shared layers."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader

from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.compare import assert_equal, run_off_and_on
from tests.harness.workload import FULL_BEFORE, Request, play, prompt_of, tokens_of

FILE = "model.safetensors"
REQUESTS = [Request(prompt_of(length)) for length in (5, 130, 300)]


def serve(llm):
    return tokens_of(play(llm, REQUESTS))


def reload_weights(worker):
    """For `collective_rpc`: the plugin's own `reload_weights` works neither on its worker nor on its runner."""
    config = worker.model_runner.vllm_config
    with set_current_vllm_config(config):
        get_model_loader(config.load_config).load_weights(worker.get_model(), model_config=config.model_config)


def reload_from(source, llm):
    """Through the file of the engine's own checkpoint, which is then as it was."""
    file = Path(engine.runner_of(llm).model_config.model) / FILE
    own = file.rename(file.with_suffix(".own"))
    shutil.copyfile(source / FILE, file)
    llm.collective_rpc(reload_weights)
    own.replace(file)


def move(llm):
    """To another device and back, as a sleep on a Gaudi does: here the plugin leaves all tensors where they are."""
    for tensor in [*engine.model_of(llm).parameters(), *engine.model_of(llm).buffers()]:
        before, tensor.data = tensor.data, tensor.data.clone()
        if before.is_floating_point():
            before.fill_(torch.nan)


def assert_as_fresh(outcome, fresh):
    assert outcome.result == fresh.result
    for now, expected in zip(outcome.prompt_passes, fresh.prompt_passes, strict=True):
        torch.testing.assert_close(now.last_hidden, expected.last_hidden, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    return [make_checkpoint(folder / f"seed {seed}", seed=seed, **FULL_BEFORE) for seed in (0, 1)]


@pytest.fixture(scope="module")
def fresh(checkpoints):
    """For each seed, outcomes of engines that have loaded its weights."""
    return [run_off_and_on(checkpoint, {"serve": serve})["serve"] for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def outcomes(checkpoints):
    """From the first seed's weights to the second's and back, on the same engines."""

    def reloaded(llm):
        reload_from(checkpoints[1], llm)
        return serve(llm)

    def updated(llm):
        engine.model_of(llm).load_weights(load_file(checkpoints[0] / FILE).items())
        return serve(llm)

    return run_off_and_on(checkpoints[0], {"loaded": serve, "reloaded": reloaded, "updated": updated})


@pytest.mark.parametrize(("name", "seed"), [("loaded", 0), ("reloaded", 1), ("updated", 0)])
def test_replaced_in_place(outcomes, fresh, name, seed):
    off, on = outcomes[name]
    assert_equal(off, on)
    assert_as_fresh(off, fresh[seed][0])
    assert_as_fresh(on, fresh[seed][1])
    assert fresh[0][1].result != fresh[1][1].result


@pytest.fixture(scope="module")
def sleeping(checkpoints):
    def level_1(llm):
        before = serve(llm)
        llm.sleep(level=1)
        assert not any(isinstance(layer.self_attn.attn.kv_cache, tuple) for layer in engine.layers_of(llm))
        move(llm)
        llm.wake_up()
        return before, serve(llm)

    def level_2(llm):
        llm.sleep(level=2)
        move(llm)
        llm.wake_up(tags=["weights"])
        reload_from(checkpoints[1], llm)
        llm.wake_up(tags=["kv_cache"])
        return serve(llm)

    return run_off_and_on(checkpoints[0], {"level 1": level_1, "level 2": level_2}, enable_sleep_mode=True)


@pytest.mark.plugin_only
def test_sleep_level_1(sleeping, fresh):
    off, on = sleeping["level 1"]
    assert_equal(off, on)
    assert on.result == (fresh[0][1].result, fresh[0][1].result)


@pytest.mark.plugin_only
def test_sleep_level_2_and_reload(sleeping, fresh):
    off, on = sleeping["level 2"]
    assert_equal(off, on)
    assert_as_fresh(on, fresh[1][1])


def test_no_kv_projections_in_shared_layers(tmp_path, fresh):
    checkpoint = make_checkpoint(tmp_path, unused_shared_projections=False, **FULL_BEFORE)
    not_strict = {"enable_weights_track": False}  # vLLM 0.26 has a `k_norm` there, and misses its weight
    off, on = run_off_and_on(checkpoint, {"serve": serve}, model_loader_extra_config=not_strict)["serve"]
    assert_equal(off, on)
    assert_as_fresh(on, fresh[0][1])
