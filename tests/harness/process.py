# SPDX-License-Identifier: Apache-2.0
"""Around an engine: lines that vLLM logs, what processes of their own print, and a process that is not needed."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def vllm_log() -> Iterator[list[logging.LogRecord]]:
    """Records of INFO and above, of vLLM and all that logs under it.

    Not with a handler: vLLM may configure its log when an engine starts, which takes handlers away.
    """
    records: list[logging.LogRecord] = []
    call_handlers = logging.Logger.callHandlers

    def collect(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.name.split(".")[0] == "vllm" and record.levelno >= logging.INFO:
            records.append(record)
        call_handlers(logger, record)

    with mock.patch.object(logging.Logger, "callHandlers", collect):
        yield records


def said(records: list[logging.LogRecord]) -> list[tuple[int, str]]:
    """What this package logged: level and message of each."""
    return [(r.levelno, r.getMessage()) for r in records if r.name.startswith("vllm.vllm_gaudi_ext")]


def start(*arguments: str, **env: str | None) -> subprocess.Popen[str]:
    """A Python process under this one's environment but for `env`, in which None takes a variable away."""
    variables = {**os.environ, **env}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in variables.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> Any:
    """What a process that ends well prints as its last line, in JSON."""
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, f"{process.args}\n{stdout[-4000:]}\n{stderr[-4000:]}"
    return json.loads(stdout.splitlines()[-1])


def inspect_models_here(patch: Any = setattr) -> None:
    """Have vLLM look at model classes in this process, not in one each, which takes as long as importing vLLM.

    `patch` is a monkeypatch's `setattr` where this shall not last.
    """
    from vllm.model_executor.models import registry

    def inspect_model_cls(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    patch(registry._LazyRegisteredModel, "inspect_model_cls", inspect_model_cls)
