# SPDX-License-Identifier: Apache-2.0
"""Pictures, through Gemma 4's own processor and vision tower."""

import pytest
from PIL import Image, ImageDraw
from vllm import SamplingParams

from tests.harness.checkpoints import IMAGE_TOKENS, make_checkpoint, vocabulary
from tests.harness.compare import assert_equal, run_off_and_on
from tests.harness.workload import FULL_BEFORE, prompt_of

pytestmark = pytest.mark.plugin_only

IMAGE_TOKEN = vocabulary()[0].index(IMAGE_TOKENS["image_token"])
SIZE = (480, 336)  # which the processor does not resize
PICTURE_LEN = 72  # its 70 tokens, and one on each side
CHUNK = 256
TEXT = {"within": (20, 40), "cut": (220, 60), "last": (50, 0)}  # tokens before the picture and after it


def pictures():
    """None, a red disk on blue, and a green bar on white."""
    disk, bar = Image.new("RGB", SIZE, "blue"), Image.new("RGB", SIZE, "white")
    ImageDraw.Draw(disk).ellipse((90, 40, 300, 250), fill="red")
    ImageDraw.Draw(bar).rectangle((30, 200, 450, 260), fill="green")
    return [None, disk, bar]


def serve(llm, before, after):
    """The tokens that follow each picture in the same text, one request at a time: chunks end at fixed places."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    start, end = prompt_of(before), prompt_of(after, seed=1)
    tokens = []
    for picture in pictures():
        prompt = {"prompt_token_ids": start + end}
        if picture is not None:
            prompt = {"prompt_token_ids": [*start, IMAGE_TOKEN, *end], "multi_modal_data": {"image": picture}}
        [output] = llm.generate(prompt, params, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
    return tokens


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("pictures"), **FULL_BEFORE)
    scenarios = {name: lambda llm, text=text: serve(llm, *text) for name, text in TEXT.items()}
    limits = {"image": 1, "audio": 0, "video": 0}
    settings = {"limit_mm_per_prompt": limits, "max_num_batched_tokens": CHUNK, "enable_prefix_caching": False}
    return run_off_and_on(checkpoint, scenarios, **settings)


@pytest.mark.parametrize("name", TEXT)
def test_picture(outcomes, name):
    off, on = outcomes[name]
    assert_equal(off, on)
    assert len({tuple(tokens) for tokens in on.result}) == 3
    before, after = TEXT[name]
    spans = [span for p in on.prompt_passes for span in p.spans()]
    whole = before + PICTURE_LEN + after
    if name == "cut":
        assert before < CHUNK < before + PICTURE_LEN
        assert spans[2:] == [(0, CHUNK), (CHUNK, whole)] * 2
    else:
        assert spans[1:] == [(0, whole)] * 2
