# SPDX-License-Identifier: Apache-2.0
"""Mixed random requests on two engines, without and with --kv-sharing-fast-prefill, until the time is over.

    python -m tests.hosts python -m benchmarks.soak --minutes 20

Lengths, shared prefixes, arrivals and aborts are random; the KV cache is small enough for preemptions, and the chunk
budget smaller than the prompts. Each round plays the same schedule on both engines, greedily: where a request with a
temperature joins a batch, the stock plugin samples greedy ones with it, and two engines without the flag differ, too.
Exit code 0 if no token differed and memory stayed flat.
"""

import argparse
import gc
import random
import sys
import tempfile
import time
from typing import Any

import psutil
from vllm import LLM

from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.workload import FULL_BEFORE, Request, play, prompt_of, tokens_of

SETTINGS = {"prompt_batch_cap": 4, "max_num_seqs": 8, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 384}


def random_requests(choose: random.Random) -> list[Request]:
    prefix = prompt_of(choose.randrange(1, 400), seed=choose.randrange(4))
    requests = []
    for _ in range(choose.randint(4, 12)):
        prompt = prompt_of(choose.randrange(1, 500), seed=choose.randrange(1000))
        if choose.random() < 0.5:
            prompt = prefix + prompt
        arrives = choose.randrange(12)
        aborted = arrives + choose.randrange(1, 6) if choose.random() < 0.15 else None
        requests.append(Request(prompt[:900], arrives, aborted, choose.randint(1, 40)))
    return requests


def count_preemptions(llm: LLM) -> list[str]:
    """The requests that the engine's scheduler preempts from now on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def preempt_request(request: Any, *args: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args)

    scheduler._preempt_request = preempt_request
    return preempted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    choose = random.Random(args.seed)
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(folder, **FULL_BEFORE)
        llms = [engine.make_llm(checkpoint, fast=fast, **SETTINGS) for fast in (False, True)]
        end = time.monotonic() + 60 * args.minutes
        preemptions = count_preemptions(llms[1])
        rounds = requests = tokens = different = 0
        memory: list[float] = []
        while time.monotonic() < end:
            schedule = random_requests(choose)
            off, on = (play(llm, schedule) for llm in llms)
            different += sum(a != b for a, b in zip(tokens_of(off), tokens_of(on), strict=True))
            rounds += 1
            requests += len(schedule)
            tokens += sum(len(o.outputs[0].token_ids) for o in on if o is not None)
            if rounds % 10 == 0:
                gc.collect()
                memory.append(process.memory_info().rss / 2**20)
                print(
                    f"{rounds} rounds, {requests} requests, {tokens} tokens, {len(preemptions)} preemptions, "
                    f"{different} different, {memory[-1]:.0f} MiB",
                    flush=True,
                )
        for llm in reversed(llms):
            engine.close(llm)
    half = len(memory) // 2
    growth = memory[-1] - memory[half] if half else 0.0
    print(f"{different} different; memory grew by {growth:.0f} MiB in the second half")
    return int(different > 0 or growth > 50)


if __name__ == "__main__":
    sys.exit(main())
