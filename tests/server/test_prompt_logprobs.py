# SPDX-License-Identifier: Apache-2.0
"""``prompt_logprobs`` with the flag: refused for each request that asks for them, and the engine goes on serving."""

import json

import pytest
from vllm import EngineArgs, SamplingParams
from vllm.plugins import load_general_plugins
from vllm.v1.engine.input_processor import InputProcessor

from tests.harness import engine
from tests.harness.process import inspect_models_here
from tests.harness.server import FLAG, serve

PROMPT = [20, 21, 22, 23, 24]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _inspect_models_here(monkeypatch):
    inspect_models_here(monkeypatch.setattr)


@pytest.fixture(scope="module")
def server(e2b, tmp_path_factory):
    """`vllm serve` with the flag, started before the engine below for the two to overlap."""
    args = ["--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "32"]
    args += ["--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}", FLAG]
    with serve(e2b, tmp_path_factory.mktemp("server"), "on", *args) as server:
        yield server


def post(server, path, **body):
    return server.request("POST", f"/v1/{path}", {"max_tokens": 4, "temperature": 0, **body})


def test_offline(e2b, server):
    llm = engine.make_llm(e2b, fast=True)
    try:
        expected = engine.generate(llm, [PROMPT])
        for prompt_logprobs in (0, 1, 5):
            with pytest.raises(ValueError, match=f"prompt_logprobs.*{FLAG}"):
                engine.generate(llm, [PROMPT, PROMPT], prompt_logprobs=prompt_logprobs)
            assert not llm.llm_engine.has_unfinished_requests()
            assert engine.generate(llm, [PROMPT]) == expected
        assert engine.generate(llm, [PROMPT], logprobs=5) == expected  # those of the output are no problem
    finally:
        engine.close(llm)


@pytest.mark.parametrize("prompt_logprobs", [0, 1, 5])
def test_without_the_flag_requests_pass_as_vllm_has_it(e2b, prompt_logprobs):
    """Also in a process in which an engine has the flag."""
    load_general_plugins()
    processors = {}
    for fast in (True, False):
        arguments = EngineArgs(model=str(e2b), dtype="float32", max_model_len=512, kv_sharing_fast_prefill=fast)
        processors[fast] = InputProcessor(arguments.create_engine_config())
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    processors[False]._validate_params(params, ("generate",))
    with pytest.raises(ValueError, match=FLAG):
        processors[True]._validate_params(params, ("generate",))
    with pytest.raises(Exception, match="does not support generation"):
        processors[False]._validate_params(params, ())


REFUSED = {
    "prompt_logprobs 0": {"prompt": PROMPT, "prompt_logprobs": 0},
    "prompt_logprobs 1": {"prompt": PROMPT, "prompt_logprobs": 1},
    "echo with logprobs": {"prompt": PROMPT, "echo": True, "logprobs": 0},
    "echo with logprobs 2": {"prompt": PROMPT, "echo": True, "logprobs": 2},
    "chat": {"messages": MESSAGES, "prompt_logprobs": 0},
    "chat, echo with logprobs": {"messages": MESSAGES, "echo": True, "logprobs": True, "top_logprobs": 1},
}


@pytest.mark.parametrize("what", REFUSED)
def test_server(what, server):
    server.wait_until_ready()
    body = REFUSED[what]
    path = "chat/completions" if "messages" in body else "completions"
    status, answer = post(server, path, **body)
    assert status == 400, answer
    assert FLAG in json.loads(answer)["error"]["message"]
    assert_serves(server, path, **{name: body[name] for name in body if name in ("prompt", "messages")})


def test_server_streaming(server):
    """vLLM has sent status 200 when it looks at the request: the error is the first event of the stream."""
    server.wait_until_ready()
    _, answer = post(server, "completions", prompt=PROMPT, prompt_logprobs=0, stream=True)
    first, *others = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    error = json.loads(first)["error"]
    assert error["code"] == 400
    assert FLAG in error["message"]
    assert not [event for event in others if "choices" in event]
    assert_serves(server, "completions", prompt=PROMPT)


def assert_serves(server, path, **body):
    status, answer = post(server, path, **body)
    assert status == 200, answer
    assert json.loads(answer)["usage"]["completion_tokens"] == 4
