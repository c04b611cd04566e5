# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel over CPU processes, on the real plugin: equal with and without the flag."""

import json
import os
from pathlib import Path

import pytest

from tests import engine, hosts
from tests.schedules import prompt_of

pytestmark = pytest.mark.plugin_only

PROMPTS = [prompt_of(n) for n in (5, 128, 129, 300)]


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """Rows per layer of each pass, as the worker processes count them."""
    file = tmp_path / "rows"
    counter = Path(hosts.__file__).with_name("row_counter")
    monkeypatch.setenv("ROW_COUNT_FILE", str(file))
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"] + os.pathsep + str(counter))

    def read():
        counted = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.write_text("")
        return [one["rows"] for one in counted if one["prompt"]]

    return read


def generate(checkpoint, **settings):
    llm = engine.make_llm(checkpoint, **settings)
    try:
        return engine.generate(llm, PROMPTS)
    finally:
        engine.close(llm)


def test_tensor_parallel_2(e2b, rows):
    alone = generate(e2b, fast=False)
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    off = generate(e2b, fast=False, **parallel)
    rows()
    on = generate(e2b, fast=True, **parallel)
    assert on == off == alone
    passes = rows()
    assert len(passes) >= 2 * len(PROMPTS), "both workers run each prompt"
    assert all(one[5:] == [1] * 5 and one[0] >= 128 for one in passes)
