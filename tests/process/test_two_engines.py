# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 with the flag and without it, one after the other in one process, in either order: the second as if alone."""

import json

import pytest

from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.process import inspect_models_here, outcome, start
from tests.harness.record import count_rows
from tests.harness.workload import FULL_BEFORE, prompt_of

LENGTHS = (5, 130, 300)
PACKAGE = "vllm_gaudi_ext"


def qualified(value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


def describe(llm):
    with count_rows(llm) as passes:
        tokens = engine.generate(llm, [prompt_of(length) for length in LENGTHS], max_tokens=4)
    modules = engine.runner_of(llm).model.named_modules()
    return {
        "tokens": tokens,
        "rows": passes,
        "modules": [[name, qualified(module), sorted(vars(module))] for name, module in modules],
        "impls": [qualified(layer.self_attn.attn.impl) for layer in engine.layers_of(llm)],
        "backends": [layer.self_attn.attn.attn_backend.__module__ for layer in engine.layers_of(llm)],
    }


def report(checkpoint, flags):
    """Of a process that makes one engine for each flag."""
    inspect_models_here()
    descriptions = []
    for fast in flags:
        llm = engine.make_llm(checkpoint, fast=fast)
        descriptions.append(describe(llm))
        engine.close(llm)
    return descriptions


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """By flag: of the first engine in a process, and of the second after one with the other flag."""
    checkpoint = str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **FULL_BEFORE))
    code = "import json; from tests.process.test_two_engines import report; print(json.dumps(report({!r}, {})))"
    orders = [(False, True), (True, False)]
    processes = [start("-c", code.format(checkpoint, order)) for order in orders]
    (off, on_after_off), (on, off_after_on) = map(outcome, processes)
    return {False: (off, off_after_on), True: (on, on_after_off)}


@pytest.mark.parametrize("fast", [False, True], ids=["off after on", "on after off"])
def test_second_engine_is_as_if_alone(engines, fast):
    alone, second = engines[fast]
    for what in alone:
        assert second[what] == alone[what], what


def test_the_two_differ_as_the_flag_says(engines):
    off, on = engines[False][0], engines[True][0]
    assert on["tokens"] == off["tokens"]
    assert PACKAGE not in json.dumps(off)
    shared = FULL_BEFORE["num_kv_shared_layers"]
    for what in ("impls", "backends"):
        assert all(name.startswith(PACKAGE) for name in on[what][-shared:])
    assert any(name.startswith(PACKAGE) for _, name, _ in on["modules"])
    prompts = [(a, b) for a, b in zip(off["rows"], on["rows"], strict=True) if a[0] >= 128]
    assert len(prompts) == len(LENGTHS)
    for whole, reduced in prompts:
        assert len(set(whole)) == 1
        assert reduced[0] == whole[0]
        assert reduced[-shared:] == [1] * shared
