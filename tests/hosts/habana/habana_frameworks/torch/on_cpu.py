# SPDX-License-Identifier: Apache-2.0
"""Makes torch accept what a Gaudi accepts: the device "hpu" (here: the CPU) and indices that a CPU would reject.

The plugin pads prompts with -1, as token id, position and cache slot. Gaudi gathers do not check bounds, and nothing
reads what they return there; here -1 means the last element, which for a cache slot is inside the padding block.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _device

_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def install() -> None:
    """Patches torch; to be called once per process, which the import of this package sees to."""
    functions: Any = torch
    methods: Any = torch.Tensor
    context: Any = _device.DeviceContext
    nn_functions: Any = F
    # `with torch.device("hpu")` recognises the factories by identity in this cached set: fill it before they change.
    factories = {id(factory) for factory in _device._device_constructors()}
    for name in [*(name for name, value in vars(torch).items() if id(value) in factories), *_LIKE]:
        setattr(functions, name, _with_cpu_device(getattr(functions, name)))
    for name in _METHODS:
        setattr(methods, name, _with_cpu_device(getattr(methods, name)))
    context.__init__ = _with_cpu_device(context.__init__)
    methods.pin_memory = lambda self, *args, **kwargs: self
    functions.Generator = _Generator

    for owner in (functions, methods):
        owner.index_select = _with_wrapped_index(owner.index_select)
    methods.index_copy_ = _with_wrapped_index(_index_copy_of_bytes(methods.index_copy_))
    methods.index_reduce_ = _with_wrapped_index(methods.index_reduce_)
    nn_functions.embedding = _embedding(F.embedding)
    nn_functions.one_hot = _one_hot(F.one_hot)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "_Generator":
        new: Any = super().__new__
        return new(cls, device=_on_cpu(device))


def _on_cpu(value: Any) -> Any:
    """`value`, or the CPU if it names the device "hpu"."""
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "hpu" else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "hpu" else value


def _with_cpu_device(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)  # needs an accelerator
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    return call


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)


def _with_wrapped_index(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(input: torch.Tensor, dim: int, index: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(input, dim, _wrapped(index, input.size(dim)), *args, **kwargs)

    return call


def _index_copy_of_bytes(function: Callable) -> Callable:
    """A CPU copies no float8 by index."""

    @functools.wraps(function)
    def index_copy_(input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if input.dtype.is_floating_point and input.dtype.itemsize == 1:
            function(input.view(torch.uint8), dim, index, source.view(torch.uint8))
            return input
        return function(input, dim, index, source)

    return index_copy_


def _embedding(function: Callable) -> Callable:
    @functools.wraps(function)
    def embedding(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return function(_wrapped(input, weight.size(0)), weight, *args, **kwargs)

    return embedding


def _one_hot(function: Callable) -> Callable:
    @functools.wraps(function)
    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if num_classes < 0:
            return function(tensor, num_classes)
        # A zero row for what is out of range: the plugin marks blocks of no sequence that way.
        inside = (tensor >= 0) & (tensor < num_classes)
        return function(torch.where(inside, tensor, 0).long(), num_classes) * inside.unsqueeze(-1)

    return one_hot
