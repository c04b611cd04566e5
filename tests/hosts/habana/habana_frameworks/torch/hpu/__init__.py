# SPDX-License-Identifier: Apache-2.0
"""The device module `torch.hpu`: one CPU "device" whose work is done when the call returns."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from habana_frameworks.torch.hpu import metrics, random

__all__ = ["metrics", "random"]


class Stream:
    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Stream | None = None) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    return _STREAM


def default_stream(device: Any = None) -> Stream:
    return _STREAM


@contextlib.contextmanager
def stream(stream: Stream) -> Iterator[None]:
    yield


def synchronize(device: Any = None) -> None:
    pass


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    pass


def get_device_name(device: Any = None) -> str:
    return "CPU"


def empty_cache() -> None:
    pass


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def wrap_in_hpu_graph(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    return module
