# SPDX-License-Identifier: Apache-2.0
"""Warm-up under PT_COMPILE_ONLY_MODE, in which graphs are compiled and not run; then serving, with those graphs.

A process of its own plays the device's part: no compiled region writes anything, and what it returns is NaN.
"""

import contextlib
import json

import pytest

from tests.harness.checkpoints import make_checkpoint
from tests.harness.process import start
from tests.harness.workload import FULL_BEFORE, prompt_of

pytestmark = pytest.mark.plugin_only

LENGTHS = (5, 128, 200)
SETTINGS = {"max_num_seqs": 1, "max_model_len": 256, "max_num_batched_tokens": 256, "enable_prefix_caching": False}


@contextlib.contextmanager
def compile_only_mode():
    """The device: yields the regions that it was asked to run while it only compiled, and those that it ran."""
    import torch
    from habana_frameworks.torch.internal import bridge_config
    from torch._dynamo.backends import registry

    compiles_only, not_run, ran = [False], [], []

    @contextlib.contextmanager
    def env_setting(name, value):
        assert name == "PT_COMPILE_ONLY_MODE"
        before, compiles_only[0] = compiles_only[0], value
        try:
            yield
        finally:
            compiles_only[0] = before

    def hpu_backend(graph, example_inputs, **options):
        def run(*args):
            if not compiles_only[0]:
                ran.append(graph)
                return graph.forward(*args)
            not_run.append(graph)
            results = graph.forward(*[x.clone() if isinstance(x, torch.Tensor) else x for x in args])
            for result in results:
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    result.fill_(torch.nan)
            return results

        return run

    bridge_config.env_setting = env_setting
    bridge_config.get_pt_compile_only_mode = lambda: compiles_only[0]
    registry._COMPILER_FNS["hpu_backend"] = hpu_backend
    yield not_run, ran


def serve(llm):
    from tests.harness import engine

    return [engine.generate(llm, [prompt_of(length)], max_tokens=4)[0] for length in LENGTHS]


def print_report(checkpoint):
    """Tokens of an engine that compiles nothing; then without and with the flag, what warm-up and serving did."""
    from tests.harness import compile_mode, engine

    llm = engine.make_llm(checkpoint, fast=False, **SETTINGS)
    expected, results = serve(llm), []
    engine.close(llm)
    with compile_only_mode() as (not_run, ran):
        for fast in (False, True):
            compile_mode.torch._dynamo.reset()
            not_run.clear()
            env = {"VLLM_SKIP_WARMUP": "false"}
            llm = engine.make_llm(checkpoint, fast=fast, enforce_eager=False, env=env, **SETTINGS)
            at_warm_up, compiled = len(not_run), compile_mode.graphs()
            ran.clear()
            results.append({"not_run_at_warm_up": at_warm_up, "tokens": serve(llm), "ran": len(ran)})
            results[-1] |= {"not_run_later": len(not_run) - at_warm_up, "compiled": compile_mode.graphs() - compiled}
            engine.close(llm)
    print(json.dumps([expected, *results]))


def test_serves_after_compile_only_warm_up(tmp_path):
    vocabulary = {"vocab_size": 1024, "vocab_size_per_layer_input": 1024}  # warm-up's token ids
    checkpoint = str(make_checkpoint(tmp_path, **FULL_BEFORE, **vocabulary))
    # compile_mode is the first to import vLLM: it sets variables for that.
    code = "import tests.harness.compile_mode; from tests.process.test_compile_only import print_report; "
    code += f"print_report({checkpoint!r})"
    process = start("-c", code)
    stdout, stderr = process.communicate(timeout=1800)
    assert process.returncode == 0, stderr[-4000:]
    expected, off, on = json.loads(stdout.splitlines()[-1])
    for result in (off, on):
        assert result["tokens"] == expected
        assert result["not_run_at_warm_up"] > 0
        assert result["not_run_later"] == 0
        assert result["compiled"] == 0
    # A fast prompt pass is fewer regions: its last layers are one.
    assert on["ran"] < off["ran"]
