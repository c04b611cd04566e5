# SPDX-License-Identifier: Apache-2.0
"""The real plugin in compile mode: nothing compiles after warm-up, and a fast pass launches far less."""

import json
import subprocess
import sys

import pytest

from tests.harness.checkpoints import make_checkpoint
from tests.harness.workload import FULL_BEFORE

pytestmark = pytest.mark.plugin_only


def run(what, checkpoint, cap):
    command = [sys.executable, "-m", "tests.harness.compile_mode", what, str(checkpoint), str(cap)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    results = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('{"variant"')]
    print(json.dumps(results))
    return {result["variant"]: result for result in results}


@pytest.mark.parametrize("cap", [1, 4])
def test_no_graph_after_warm_up(cap, tmp_path):
    """50 prompts of random lengths, with and without context, the first request included."""
    # Warm-up runs token ids up to the longest prompt.
    vocabulary = {"vocab_size": 1024, "vocab_size_per_layer_input": 1024}
    results = run("graphs", make_checkpoint(tmp_path, **FULL_BEFORE, **vocabulary), cap)
    off = results["off"]
    assert len(off["compiled"]) == 50
    for result in results.values():
        assert not any(result["compiled"])
        assert not result["graph_breaks"]
        assert result["tokens"] == off["tokens"]
        assert result["warm_up"] <= off["warm_up"] + off["prompt_buckets"]


def test_launches(tmp_path):
    checkpoint = make_checkpoint(tmp_path, num_layers=35, num_kv_shared_layers=20)
    results = run("launches", checkpoint, 1)
    launches = {name: r["prompt"]["regions"] + r["prompt"]["eager"] for name, r in results.items()}
    assert results["off"]["prompt"]["regions"] > 35
    assert launches["reduced"] <= launches["plain"] <= 0.6 * launches["off"]
    # Of its own the package adds three regions, and between them no operator that the plugin's pass does not have.
    for variant in ("plain", "reduced"):
        assert results[variant]["prompt"]["regions"] <= 15 + 6
        for name, count in results[variant]["prompt"]["eager_by_name"].items():
            assert count <= results["off"]["prompt"]["eager_by_name"].get(name, 0)
        assert results[variant]["decode"] == results["off"]["decode"]
