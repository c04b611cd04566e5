# SPDX-License-Identifier: Apache-2.0
"""How much faster a prompt pass is with --kv-sharing-fast-prefill, beside what its multiply-adds allow.

    python -m tests.hosts python -m benchmarks.prompt_pass --lengths 1024

Three float32 engines in one process, alike but for the flag: off, on with the plain technique (KV-shared layers on last
tokens), and on with the last KV producer reduced, too. They serve the same prompts in turn, one token out. Timed is the
forward of the model adapter in the runner, added up over the passes of a prompt: CPU time of one thread, which other
processes on the machine disturb less than wall time.
"""

import argparse
import importlib.metadata
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import Gemma4Config
from vllm import LLM

from tests import hosts
from tests.harness import engine
from tests.harness.checkpoints import make_checkpoint
from tests.harness.record import count_rows
from tests.harness.workload import BLOCK, prompt_of

LAYERS = {"E2B": (35, 20), "E4B": (42, 18)}  # all, KV-shared
VARIANTS = {
    "off": {"fast": False},
    "plain": {"fast": True, "env": {"VLLM_GAUDI_EXT_REDUCE_KV_PRODUCER": "0"}},
    "reduced": {"fast": True, "env": {"VLLM_GAUDI_EXT_REDUCE_KV_PRODUCER": "1"}},
}


class Pass(NamedTuple):
    tokens: int  # of the padded prompt or chunk
    context: int  # tokens before it, in the KV cache
    rows: list[int]  # that each layer's MLP saw
    seconds: float


def multiply_adds(config: Any, prompt_pass: Pass, with_masked: bool) -> int:
    """Multiply-adds of a pass of one sequence: linear layers, attention, per-layer inputs; no vocabulary.

    With the published widths and 1,024 tokens, off / plain is 3.19 for E2B and 1.72 for E4B; off / reduced is 3.51 and
    1.81.

    Args:
        with_masked: count what attention masks, too, where every token has a query: the plugin's mask is no window of
            the kernel's, so that sliding layers, too, multiply every query with every key of the pass.
    """
    tokens, context, rows, _ = prompt_pass
    hidden, ple_dim, heads = config.hidden_size, config.hidden_size_per_layer_input, config.num_attention_heads
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    producer_is_reduced = rows[first_shared - 1] < tokens
    total = 0
    for layer, layer_type in enumerate(config.layer_types):
        is_shared, is_full = layer >= first_shared, layer_type == "full_attention"
        head_dim = config.global_head_dim if is_full else config.head_dim
        intermediate = config.intermediate_size * (2 if is_shared and config.use_double_wide_mlp else 1)
        width = context + tokens if is_full else config.sliding_window
        # Query and output projection, MLP, gate and projection of the per-layer input.
        total += rows[layer] * hidden * (2 * heads * head_dim + 3 * intermediate + 2 * ple_dim)
        # Where the per-layer input comes from: the plain technique computes those of all layers for every token.
        total += (rows[layer] if producer_is_reduced else tokens) * hidden * ple_dim
        if not is_shared:
            total += tokens * hidden * 2 * config.num_key_value_heads * head_dim
        if with_masked and rows[layer] == tokens:
            keys = tokens * (min(context, width) + tokens)
        else:
            keys = sum(min(context + i + 1, width) for i in range(tokens - rows[layer], tokens))
        total += 2 * heads * head_dim * keys
    return total


@contextmanager
def record_passes(llm: LLM) -> Iterator[list[Pass]]:
    """Records the prompt passes of an engine."""
    adapter = engine.runner_of(llm).model
    forward, passes = adapter.forward, []

    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        result = forward(*args, **kwargs)
        seconds = time.thread_time() - start
        positions = kwargs["positions"]
        if kwargs["input_ids"].shape[-1] > 1:
            passes.append(Pass(positions.numel(), int(positions[0, 0]), rows[-1], seconds))
        return result

    with count_rows(llm) as rows:
        adapter.forward = timed_forward
        try:
            yield passes
        finally:
            adapter.forward = forward


@dataclass
class Case:
    length: int
    cached: int  # tokens of the prompt that the prefix cache holds

    def run(self, llms: dict[str, LLM], seed: int) -> dict[str, list[Pass]]:
        """The passes of one prompt on each engine."""
        prompt, other = (prompt_of(self.length, 2 * seed + i) for i in range(2))  # no prompt starts like another
        passes = {}
        for name, llm in llms.items():
            if self.cached:
                engine.generate(llm, [prompt[: self.cached] + other[self.cached :]], max_tokens=1)
            with record_passes(llm) as passes[name]:
                engine.generate(llm, [prompt], max_tokens=1)
        return passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LAYERS, default="E2B")
    parser.add_argument("--divisor", type=int, default=4, help="of the published widths (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024], help="prompt tokens")
    parser.add_argument("--cached", type=float, default=0, metavar="FRACTION", help="that the prefix cache holds")
    parser.add_argument("--chunk", type=int, help="tokens per pass at most (default: whole prompts)")
    parser.add_argument("--repeats", type=int, default=5, help="prompts per length (default: %(default)s)")
    args = parser.parse_args()

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    num_layers, num_shared = LAYERS[args.shape]
    longest = max(args.lengths) + BLOCK
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(
            folder,
            shape=args.shape,
            num_layers=num_layers,
            num_kv_shared_layers=num_shared,
            sliding_window=512,
            divisor=args.divisor,
        )
        config = Gemma4Config.from_pretrained(folder).text_config
        settings = {"max_model_len": longest, "max_num_batched_tokens": args.chunk or longest, "max_num_seqs": 4}
        llms = {name: engine.make_llm(checkpoint, **variant, **settings) for name, variant in VARIANTS.items()}
        cases = [Case(n, int(args.cached * n) // BLOCK * BLOCK) for n in args.lengths]
        print(
            f"\n{args.shape} with widths / {args.divisor}, {num_layers} layers, {num_shared} KV-shared; "
            f"vLLM {importlib.metadata.version('vllm')}, {hosts.name()}; "
            f"medians of {args.repeats}\n"
        )
        print(
            "tokens cached passes   off ms" + "".join(f" | {name:>7}     bound     masked" for name in list(llms)[1:])
        )
        for case in cases:
            print(measure(case, llms, config, args.repeats), flush=True)
        for llm in reversed(llms.values()):
            engine.close(llm)


def measure(case: Case, llms: dict[str, LLM], config: Any, repeats: int) -> str:
    """The line of a case: sizes, time with the flag off, and of each variant how many times faster it is.

    Beside it what the multiply-adds predict, without and with those that attention masks, and the share of it reached.
    """
    case.run(llms, seed=0)
    runs = [case.run(llms, seed=1 + i) for i in range(repeats)]
    seconds = {name: statistics.median(sum(p.seconds for p in run[name]) for run in runs) for name in llms}
    line = f"{case.length:6} {case.cached:6} {len(runs[0]['off']):6} {seconds['off'] * 1000:8.0f}"
    for name in list(llms)[1:]:
        ratio = seconds["off"] / seconds[name]
        line += f" | {ratio:6.2f}x"
        for with_masked in (False, True):
            off, on = (sum(multiply_adds(config, p, with_masked) for p in runs[0][v]) for v in ("off", name))
            line += f" {off / on:5.2f} {ratio * on / off:4.0%}"
    return line


if __name__ == "__main__":
    main()
