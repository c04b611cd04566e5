# SPDX-License-Identifier: Apache-2.0
import os
import sys

import pytest

from tests import hosts

# Before anything imports vLLM: it looks for its platform among the entry points on the path.
os.environ.update(hosts.environment())
sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]


@pytest.fixture(scope="session")
def e2b(tmp_path_factory):
    """A small E2B-shaped checkpoint of the multimodal architecture, sliding window 128."""
    from tests.harness.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("e2b"))


def pytest_report_header():
    return f"host: {hosts.name()}"


def pytest_collection_modifyitems(items):
    if hosts.name() == "plugin":
        return
    for item in items:
        if item.get_closest_marker("plugin_only"):
            item.add_marker(pytest.mark.skip(reason="needs the real vllm-gaudi: set VLLM_GAUDI_ROOT"))
