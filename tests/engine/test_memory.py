# SPDX-License-Identifier: Apache-2.0
"""Peak memory of the layers that run on last tokens: all together less than one of them needs on all tokens."""

from torch.profiler import ProfilerActivity, profile

from tests.harness import engine
from tests.harness.workload import BLOCK, prompt_of

HEAD_SIZE = 32  # of full attention in the checkpoint, with one KV head
PROMPTS = {"without context": 1024, "mostly cached": 3968 + BLOCK}


def record_peaks(module, peaks):
    """Appends, for each call of the module, the most bytes that were allocated since it began."""
    forward = module.forward

    def profiled(*args, **kwargs):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = forward(*args, **kwargs)
        events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        peaks.append(peak)
        return result

    module.forward = profiled


def peaks_of(checkpoint, *, fast):
    """For each prompt, the peak of each module that runs the KV-shared layers: one of all with the flag, else each."""
    llm = engine.make_llm(checkpoint, fast=fast, dtype="bfloat16", max_model_len=4224, max_num_batched_tokens=4224)
    modules = [engine.text_model_of(llm).regions[1]] if fast else engine.layers_of(llm)[5:]
    peaks = [[] for _ in modules]
    found = {}
    for name, length in PROMPTS.items():
        prompt = prompt_of(length)
        if name == "mostly cached":
            engine.generate(llm, [prompt[:-BLOCK]], max_tokens=1)
        for module, of_module in zip(modules, peaks, strict=True):
            module.__dict__.pop("forward", None)
            of_module.clear()
            record_peaks(module, of_module)
        engine.generate(llm, [prompt], max_tokens=1)
        found[name] = [of_module[0] for of_module in peaks]
    engine.close(llm)
    return found


def test_peak_memory(e2b):
    off, on = (peaks_of(e2b, fast=fast) for fast in (False, True))
    print({name: (on[name], off[name]) for name in PROMPTS})
    assert 0 < on["without context"][0] < min(off["without context"])
    # What a short chunk needs is its context, longest in full attention: K and V in float32, and V in bfloat16, too,
    # while it is converted. The rest, slots, masks and the window of the sliding layers, is a tenth of that.
    keys = PROMPTS["mostly cached"] * HEAD_SIZE
    assert 0 < on["mostly cached"][0] < 1.1 * keys * (4 + 4 + 2)
