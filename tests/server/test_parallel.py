# SPDX-License-Identifier: Apache-2.0
"""Several workers, as CPU processes under `vllm serve` on the real plugin: equal with and without the flag."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.server import FLAG, serve
from tests.harness.workload import prompt_of

pytestmark = pytest.mark.plugin_only

# The plugin's mask of a cached prefix shows one token more than the window, so that tokens depend on what is cached.
ARGS = (
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "8",
    "--num-gpu-blocks-override",
    "32",
    "--no-enable-prefix-caching",
)
PROMPTS = [prompt_of(n) for n in (5, 128, 129, 300)]
TENSOR_PARALLEL, DATA_PARALLEL = ("--tensor-parallel-size", "2"), ("--data-parallel-size", "2")


@pytest.fixture(scope="module")
def tokens(e2b, tmp_path_factory):
    """What a server with one worker and without the flag answers."""
    with serve(e2b, tmp_path_factory.mktemp("one"), "one", *ARGS) as server:
        server.wait_until_ready()
        return [server.complete(prompt, 8) for prompt in PROMPTS]


def assert_reduced(passes):
    assert all(p["rows"][5:] == [p["sequences"]] * 5 and p["rows"][0] >= 128 for p in passes)


def test_tensor_parallel_2(e2b, tokens, tmp_path):
    with serve(e2b, tmp_path, "off", *ARGS, *TENSOR_PARALLEL) as server:
        server.wait_until_ready()
        assert [server.complete(prompt, 8) for prompt in PROMPTS] == tokens
    with serve(e2b, tmp_path, "on", *ARGS, *TENSOR_PARALLEL, FLAG) as server:
        server.wait_until_ready()
        assert [server.complete(prompt, 8) for prompt in PROMPTS] == tokens
        passes = server.prompt_passes()
    assert len(passes) == 2 * len(PROMPTS), "both workers run each prompt"
    assert_reduced(passes)


def test_data_parallel_2_with_an_idle_rank(e2b, tokens, tmp_path):
    """vLLM runs the ranks of a dense model as engines that do not wait for each other."""
    with serve(e2b, tmp_path, "on", *ARGS, *DATA_PARALLEL, FLAG) as server:
        server.wait_until_ready()
        one_by_one = [server.complete(prompt, 8) for prompt in PROMPTS]  # the other rank idles
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            at_once = list(pool.map(lambda prompt: server.complete(prompt, 8), PROMPTS))
        passes = server.prompt_passes()
    assert one_by_one == at_once == tokens
    assert len(passes) >= len(PROMPTS)
    assert_reduced(passes)
