# SPDX-License-Identifier: Apache-2.0
"""``vllm-gaudi-ext check``: would fast prefill be active here? Answers without loading a model."""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys

ACTIVE, INACTIVE, DRIFTED = 0, 1, 2
STATUS = {ACTIVE: "active", INACTIVE: "not active", DRIFTED: "drifted"}


def check() -> tuple[int, list[str]]:
    """Exit code and reasons: 0 would be active, 1 not active, 2 vllm or vllm-gaudi has drifted from what is needed."""
    for module, distribution in (("vllm", "vllm"), ("vllm_gaudi", "vllm-gaudi")):
        if importlib.util.find_spec(module) is None:
            return INACTIVE, [f"{distribution} is not installed"]
    from vllm.platforms import current_platform

    if current_platform.device_name != "hpu":
        return INACTIVE, [f"vLLM runs on platform {current_platform.device_name or 'none'!r} here, not on hpu"]
    from vllm_gaudi_ext import compat
    from vllm_gaudi_ext.config import LEFT_TO_PLUGIN, Fast, Refused, decide

    if compat.plugin_has_fast_prefill():
        return INACTIVE, [LEFT_TO_PLUGIN.reason]
    try:
        importlib.import_module(compat.HPU_ATTN)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("vllm", "vllm_gaudi"):
            return INACTIVE, [f"vllm-gaudi cannot be imported: {error}"]
    if findings := compat.drift():
        return DRIFTED, findings
    from vllm_gaudi.extension.runtime import get_config

    verdict = decide(features=get_config())
    if isinstance(verdict, Refused):
        return INACTIVE, [verdict.message]
    if not isinstance(verdict, Fast):
        return INACTIVE, [f"prompts take the normal path: {verdict.reason}"]
    if misfit := compat.transformers_misfit():
        return INACTIVE, [misfit]
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.plugins import load_general_plugins

    from vllm_gaudi_ext.patches import MODELS

    load_general_plugins()
    registered = {name: ModelRegistry.models[name] for name in MODELS}
    if any(f"{m.module_name}:{m.class_name}" != MODELS[name] for name, m in registered.items()):
        return INACTIVE, [f"the plugin is not loaded: VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r} leaves it out"]
    return ACTIVE, [
        *(f"{release} was not run, but all that is relied on was found there" for release in compat.not_run()),
        "add --kv-sharing-fast-prefill to vllm serve",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="vllm-gaudi-ext")
    commands = parser.add_subparsers(dest="command", required=True)
    check_parser = commands.add_parser("check", help="would fast prefill be active? answers without loading a model")
    check_parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.redirect_stdout(sys.stderr):  # vllm and vllm-gaudi log to standard output while they are imported
        code, reasons = check()
    versions = {}
    for distribution in ("vllm-gaudi-ext", "vllm", "vllm-gaudi"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[distribution] = importlib.metadata.version(distribution)
    if args.json:
        print(json.dumps({"status": STATUS[code], "exit_code": code, "reasons": reasons, "versions": versions}))
    else:
        print(f"fast prefill: {STATUS[code]} ({', '.join(f'{name} {v}' for name, v in versions.items())})")
        for reason in reasons:
            print(f"  {reason}")
    return code


if __name__ == "__main__":
    sys.exit(main())
