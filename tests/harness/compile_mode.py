# SPDX-License-Identifier: Apache-2.0
"""The real plugin in its compile mode on a CPU, as a process of its own: what it compiles and what a pass launches.

    python -m tests.hosts python -m tests.harness.compile_mode graphs|launches CHECKPOINT PROMPT_BATCH_CAP

Prints one JSON object per variant: the flag off; on with the plain technique; on with the last KV producer reduced.
"""

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The plugin takes the branches of a Gaudi 2 that compiles; the device behind them is the CPU all the same.
os.environ |= {"VLLM_USE_FAKE_HPU": "0", "VLLM_BUILD": "1.23.0.100", "PT_HPU_LAZY_MODE": "0"}

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from vllm import LLM  # noqa: E402

from tests.harness import engine  # noqa: E402
from tests.harness.workload import prompt_of  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {
    "off": {"fast": False},
    "plain": {"fast": True, "env": {"VLLM_GAUDI_EXT_REDUCE_KV_PRODUCER": "0"}},
    "reduced": {"fast": True},
}
MAX_MODEL_LEN = 512
SETTINGS = {"enforce_eager": False, "max_num_seqs": 4, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 512}


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@contextmanager
def graphs_by_bucket() -> Iterator[dict[str, tuple[int, int]]]:
    """Graphs that warm-up compiles for each bucket, in its order, and the operators in them.

    A bucket is (batch, tokens, context blocks) of a pass.
    """
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    prepare, by_bucket = HPUModelRunner._prepare_dummy_scenario, {}

    def prepare_dummy_scenario(self: Any, prompt_cfg: Any, decode_cfg: Any) -> None:
        graphs_before, operators_before = graphs(), counters["stats"]["calls_captured"]
        prepare(self, prompt_cfg, decode_cfg)
        compiled = graphs() - graphs_before, counters["stats"]["calls_captured"] - operators_before
        by_bucket[f"prompt {prompt_cfg}" if prompt_cfg else f"decode {decode_cfg}"] = compiled

    HPUModelRunner._prepare_dummy_scenario = prepare_dummy_scenario
    try:
        yield by_bucket
    finally:
        HPUModelRunner._prepare_dummy_scenario = prepare


def measure_graphs(llm: LLM, cap: int) -> dict[str, Any]:
    """50 steps of prompts of random lengths, every third with a cached prefix: the graphs that each one compiled."""
    buckets = engine.runner_of(llm).bucketing_manager.prompt_buckets
    at_warm_up, compiled, tokens = graphs(), [], []
    choose = random.Random(0)
    prefix = prompt_of(256)
    for step in range(50):
        before = graphs()
        lengths = [choose.randrange(1, MAX_MODEL_LEN - 4) for _ in range(choose.randint(1, cap))]
        prompts = [prompt_of(length, seed=1 + cap * step + i) for i, length in enumerate(lengths)]
        if step % 3 == 2:
            prompts[0] = (prefix + prompts[0])[: MAX_MODEL_LEN - 4]
        tokens += engine.generate(llm, prompts, max_tokens=3)
        compiled.append(graphs() - before)
    return {"warm_up": at_warm_up, "prompt_buckets": len(buckets), "compiled": compiled, "tokens": tokens}


def measure_launches(llm: LLM, cap: int) -> dict[str, Any]:
    """Compiled regions entered and eager operators dispatched in one prompt pass and in one decode pass."""
    adapter = engine.runner_of(llm).model
    forward, launches = adapter.forward, []

    def profiled_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = forward(*args, **kwargs)
        launches.append(_launches(profile))
        return result

    for step in range(3):
        if step == 2:  # all is compiled
            adapter.forward = profiled_forward
        engine.generate(llm, [prompt_of(200, seed=cap * step + i) for i in range(cap)], max_tokens=2)
    adapter.forward = forward
    return dict(zip(("prompt", "decode"), launches, strict=True))


def _launches(profile: torch.profiler.profile) -> dict[str, Any]:
    regions, eager = 0, Counter[str]()
    for event in profile.events():
        around, parent = [], event.cpu_parent
        while parent is not None:
            around.append(parent.name)
            parent = parent.cpu_parent
        if any(name.startswith("Torch-Compiled Region") for name in around):
            continue
        if event.name.startswith("Torch-Compiled Region"):
            regions += 1
        elif event.name.startswith("aten::") and not any(name.startswith("aten::") for name in around):
            eager[event.name] += 1
    return {"regions": regions, "eager": sum(eager.values()), "eager_by_name": eager}


def main() -> None:
    what, checkpoint, cap = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.environ["VLLM_SKIP_WARMUP"] = "false" if what == "graphs" else "true"
    # Past the limit a region silently runs uncompiled, and compiles no graph any more.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for variant, settings in VARIANTS.items():
        torch._dynamo.reset()
        counters.clear()
        caching = {"enable_prefix_caching": what == "graphs"}
        with graphs_by_bucket() as by_bucket:
            llm = engine.make_llm(checkpoint, prompt_batch_cap=cap, **settings, **SETTINGS, **caching)
        measured = (measure_graphs if what == "graphs" else measure_launches)(llm, cap)
        engine.close(llm)
        result = {"variant": variant, "graph_breaks": counters["graph_break"], "warm_up_by_bucket": by_bucket}
        print(json.dumps(result | measured), flush=True)


if __name__ == "__main__":
    main()
