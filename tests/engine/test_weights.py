# SPDX-License-Identifier: Apache-2.0
"""Weights: none for the K/V of KV-shared layers; others in place of those loaded, from disk and from memory."""

import os
import shutil

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


def replace(source, target):
    """By name: a loaded file may be mapped into memory."""
    shutil.copyfile(source, f"{target}.new")
    os.replace(f"{target}.new", target)


def reload_weights(worker):
    """For `collective_rpc`: the plugin's own `reload_weights` works neither on its worker nor on its runner."""
    config = worker.model_runner.vllm_config
    with set_current_vllm_config(config):
        get_model_loader(config.load_config).load_weights(worker.get_model(), model_config=config.model_config)


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
def outcomes(checkpoints, tmp_path_factory):
    """From the first seed's weights to the second's and back, on the same engines."""
    checkpoint = shutil.copytree(checkpoints[0], tmp_path_factory.mktemp("replaced") / "checkpoint")

    def reloaded(llm):
        replace(checkpoints[1] / FILE, checkpoint / FILE)
        llm.collective_rpc(reload_weights)
        replace(checkpoints[0] / FILE, checkpoint / FILE)
        return serve(llm)

    def updated(llm):
        engine.model_of(llm).load_weights(load_file(checkpoints[0] / FILE).items())
        return serve(llm)

    return run_off_and_on(checkpoint, {"loaded": serve, "reloaded": reloaded, "updated": updated})


@pytest.mark.parametrize(("name", "seed"), [("loaded", 0), ("reloaded", 1), ("updated", 0)])
def test_replaced_in_place(outcomes, fresh, name, seed):
    off, on = outcomes[name]
    assert_equal(off, on)
    assert_as_fresh(off, fresh[seed][0])
    assert_as_fresh(on, fresh[seed][1])
    assert fresh[0][1].result != fresh[1][1].result


def test_no_kv_projections_in_shared_layers(tmp_path, fresh):
    checkpoint = make_checkpoint(tmp_path, unused_shared_projections=False, **FULL_BEFORE)
    not_strict = {"enable_weights_track": False}  # vLLM 0.26 has a `k_norm` there, and misses its weight
    off, on = run_off_and_on(checkpoint, {"serve": serve}, model_loader_extra_config=not_strict)["serve"]
    assert_equal(off, on)
    assert_as_fresh(on, fresh[0][1])
