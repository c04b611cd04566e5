# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.harness.process import inspect_models_here


@pytest.fixture(autouse=True)
def _inspect_models_here(monkeypatch):
    inspect_models_here(monkeypatch.setattr)


@pytest.fixture(scope="session")
def no_kv_sharing(tmp_path_factory):
    """As the 31B and 26B-A4B models have it."""
    from tests.harness.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("no_kv_sharing"), num_kv_shared_layers=0, num_layers=5)
