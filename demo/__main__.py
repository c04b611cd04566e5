# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the same requests to `vllm serve` without and with --kv-sharing-fast-prefill, side by side.

Exit code 0 if all greedy tokens are equal and the KV-shared layers ran on one row per sequence of each prompt pass.
"""

import importlib.metadata
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import hosts
from tests.harness.server import FLAG, Server, ServerError, serve

NUM_LAYERS, NUM_SHARED = 35, 20  # as in E2B
FIRST_SHARED = NUM_LAYERS - NUM_SHARED
WINDOW, BLOCK, MAX_MODEL_LEN, MAX_TOKENS = 512, 128, 1152, 16
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, WINDOW - 1, WINDOW, WINDOW + 1, 300, MAX_MODEL_LEN - MAX_TOKENS]
TIMED_LENGTHS = [1024] * 4
ENGINE_ARGS = [
    *("--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", "160"),
    # No prompt is chunked: where, would depend on when the requests arrive, and a chunk's mask is not a whole prompt's.
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "8192"),
]


class Failure(Exception):
    """Ends the demo with one message."""


def say(message: str, started: float = time.monotonic()) -> None:
    print(f"[{time.monotonic() - started:5.1f} s] {message}", flush=True)


def exchange(off: Server, on: Server) -> tuple[int, dict[str, float]]:
    """Send the requests to both servers: how many got equal tokens, and the prompt tokens/s of each server."""
    from tests.harness.workload import prompt_of, prompts_of

    prompts = prompts_of(LENGTHS)
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        sent = [[pool.submit(server.complete, prompt, MAX_TOKENS) for prompt in prompts] for server in (off, on)]
        tokens_off, tokens_on = ([request.result() for request in requests] for requests in sent)
    equal = sum(a == b for a, b in zip(tokens_off, tokens_on, strict=True))
    say(f"{len(prompts)} requests of 1 to {LENGTHS[-1]:,} tokens, {MAX_TOKENS} tokens out, all at once to both servers")

    seconds = {off.name: 0.0, on.name: 0.0}
    for prompt in (prompt_of(length, seed=1 + i) for i, length in enumerate(TIMED_LENGTHS)):
        for server in (off, on):
            start = time.perf_counter()
            server.complete(prompt, 1)
            seconds[server.name] += time.perf_counter() - start
    say(f"{len(TIMED_LENGTHS)} requests of {TIMED_LENGTHS[0]:,} tokens, 1 token out, one by one to either server")
    return equal, {name: sum(TIMED_LENGTHS) / total for name, total in seconds.items()}


def report(off: Server, on: Server, equal: int, tokens_per_second: dict[str, float]) -> None:
    """Print the table.

    Raises:
        Failure: if it does not show what the flag is for.
    """
    passes_off, passes_on = off.prompt_passes(), on.prompt_passes()
    if not passes_off or not passes_on:
        raise Failure("the servers counted no rows")
    groups = {
        f"layers 0-{FIRST_SHARED - 1}": slice(FIRST_SHARED),
        f"KV-shared layers {FIRST_SHARED}-{NUM_LAYERS - 1}": slice(FIRST_SHARED, None),
    }
    print(f"\n{'':52}{'off':>12}{'on':>12}{'gain':>10}")
    print(f"{'requests with the same tokens':52}{f'{equal} of {len(LENGTHS)}':>24}")
    for label, layers in groups.items():
        seen_off, seen_on = (sum(sum(p["rows"][layers]) for p in passes) for passes in (passes_off, passes_on))
        gain = f"{seen_off / seen_on:.1f}x"
        print(f"{'rows seen in prompt passes, ' + label:52}{seen_off:12,}{seen_on:12,}{gain:>10}")
    speed_off, speed_on = tokens_per_second[off.name], tokens_per_second[on.name]
    print(
        f"{'prompt tokens/s':52}{speed_off:12,.0f}{speed_on:12,.0f}{f'{speed_on / speed_off:.2f}x':>10}\n", flush=True
    )

    if equal < len(LENGTHS):
        raise Failure(f"{len(LENGTHS) - equal} requests got different tokens")
    if any(p["rows"] != [p["rows"][0]] * NUM_LAYERS for p in passes_off):
        raise Failure(f"without {FLAG} not all layers saw the same rows")
    if any(p["rows"][FIRST_SHARED:] != [p["sequences"]] * NUM_SHARED for p in passes_on):
        raise Failure(f"with {FLAG} the KV-shared layers did not see one row per sequence of each prompt pass")


def last_lines(log: Path, count: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit that stops the servers
    folder = Path(tempfile.mkdtemp(prefix="vllm-gaudi-ext-demo-"))
    try:
        from transformers.utils.logging import disable_progress_bar

        from tests.harness.checkpoints import make_checkpoint

        disable_progress_bar()

        checkpoint = make_checkpoint(
            folder / "checkpoint",
            num_layers=NUM_LAYERS,
            num_kv_shared_layers=NUM_SHARED,
            sliding_window=WINDOW,
            divisor=8,
        )
        say(f"a random checkpoint of E2B's shape, {NUM_LAYERS} layers, {NUM_SHARED} KV-shared, an eighth as wide")
        with (
            serve(checkpoint, folder, "off", *ENGINE_ARGS) as off,
            serve(checkpoint, folder, "on", *ENGINE_ARGS, FLAG) as on,
        ):
            host = "vllm-gaudi" if hosts.name() == "plugin" else "the stand-in for vllm-gaudi"
            say(f"vLLM {importlib.metadata.version('vllm')} on {host}: starting a server without and one with {FLAG}")
            say(f"this takes 1 to 2 minutes on idle cores; the servers log to {folder}")
            for server in (off, on):
                server.wait_until_ready()
                say(f"{server.name}: the server answers")
            equal, tokens_per_second = exchange(off, on)
        report(off, on, equal, tokens_per_second)
        say("passed: same tokens, and the KV-shared layers saw one row per prompt")
    except (Failure, ServerError, OSError) as failure:  # OSError: a server that is gone
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log}, its end:\n{last_lines(log)}", file=sys.stderr)
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
