# SPDX-License-Identifier: Apache-2.0
"""Which releases fit, and what the check for drift finds."""

import dataclasses
import importlib
import importlib.metadata
import sys
from types import ModuleType

import pytest

from vllm_gaudi_ext import compat


@pytest.mark.parametrize("distribution, version, expected", [
    ("vllm", "0.25.1", "too old"),
    ("vllm", "0.26.0", "supported"),
    ("vllm", "0.30.2+cpu", "supported"),
    ("vllm", "0.31.0rc1", "not run"),
    ("vllm", "0.33.0", "not run"),
    ("vllm-gaudi", "0.25.9", "too old"),
    ("vllm-gaudi", "0.26.0+gaudi", "supported"),
    ("vllm-gaudi", "0.30.0", "supported"),
    ("vllm-gaudi", "0.31.0", "not run"),
    ("vllm-gaudi", "0.0.0+checkout", "supported"),
    ("vllm-gaudi", "0.1.dev7+g123abc", "supported"),
])  # fmt: skip
def test_supported_versions(distribution, version, expected, monkeypatch):
    versions = {"vllm": "0.26.0", "vllm-gaudi": "0.26.0", distribution: version}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    found = {"too old": compat.too_old(), "not run": compat.not_run()}
    assert {name for name, findings in found.items() if findings} == {expected} - {"supported"}
    assert all(finding.startswith(f"{distribution} {version}") for findings in found.values() for finding in findings)


@pytest.mark.parametrize("vllm, transformers, fits", [
    ("0.26.0", "5.14.1", True),
    ("0.26.0", "5.15.0", False),
    ("0.27.1", "5.20.2", False),
    ("0.30.0", "5.20.2", True),
])  # fmt: skip
def test_transformers_that_vllm_cannot_load_gemma_4_with(vllm, transformers, fits, monkeypatch):
    versions = {"vllm": vllm, "vllm-gaudi": "0.26.0", "transformers": transformers}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    misfit = compat.transformers_misfit()
    assert misfit is None if fits else misfit.endswith("pip install transformers==5.14.1")


def test_missing_imports_knows_what_modules_and_functions_import():
    imports = compat._imports()
    assert imports["vllm.forward_context:"].split() == ["get_forward_context"] * 2  # prompt_pass, models/gemma4
    assert "HPUModelRunner" in imports["vllm_gaudi.v1.worker.hpu_model_runner:"].split()  # within a function
    assert "VllmConfig" in imports["vllm.config:"].split()  # for type checkers
    assert all(module.startswith("vllm") for module in imports)


@pytest.fixture
def installed(monkeypatch):
    """A module of the name `installed`, to be looked through."""
    module = ModuleType("installed")
    monkeypatch.setitem(sys.modules, "installed", module)
    return module


def findings(table, contains=lambda obj: lambda name: hasattr(obj, name)):
    return list(compat._each(table, contains, "no {!r}"))


def test_what_is_not_there_is_a_finding(installed):
    installed.Found = type("Found", (), {"a": 1})
    assert findings({"installed:": "Found", "installed:Found": "a"}) == []
    assert findings({"installed:Found": "a b"}) == ["installed.Found has no 'b'"]
    assert findings({"installed:Gone.method": ""}) == [
        "installed.Gone.method: module 'installed' has no attribute 'Gone'"
    ]
    assert findings({"not_installed:": "a"}) == ["not_installed: No module named 'not_installed'"]


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError])
def test_what_cannot_be_imported_is_a_finding(error, monkeypatch):
    def import_module(name):
        raise error("broken")

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert compat.missing_imports()[0].endswith(": broken")
    assert not compat.plugin_has_fast_prefill()


def test_another_kind_of_object_is_a_finding(installed):
    installed.BatchContents = object
    found = findings({"installed:BatchContents": "field"}, dataclasses.fields)
    assert found == ["installed.BatchContents: must be called with a dataclass type or instance"]


SOURCE = """
class Base:
    def __init__(self):
        self.inherited = 1
class Layer(Base):
    def __init__(self):
        self.plain = self.typed_source = 1
        self.typed: int = 2
        self.first, self.second, self.third = 1, 2, 3
        self.register_buffer("buffer", None)
        assert self.compared == 1
        self.call(self.read, eps=1)
"""


def test_attributes_that_code_sets(tmp_path, monkeypatch):
    (tmp_path / "vllm_layer.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    sets = compat._assigns(importlib.import_module("vllm_layer").Layer)
    assert all(map(sets, ("inherited", "plain", "typed", "first", "second", "third", "buffer")))
    assert not any(map(sets, ("compared", "read", "call", "gone")))
