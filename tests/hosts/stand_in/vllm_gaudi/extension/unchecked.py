# SPDX-License-Identifier: Apache-2.0
"""Gaudi's gathers and scatters do not bounds-check, and the plugin pads ids, positions, slots and blocks with -1.

On a CPU a negative index is made to count from the end, as indexing with brackets does, so that padding reads and
writes the last row (of a KV cache: the pad block) instead of raising.
"""

from typing import Any

import torch


def _wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)


def wrap_negative_indices() -> None:
    """Patch the indexing operations of torch that refuse -1; once per process."""
    if torch.index_select is _index_select:
        return
    embedding = torch.nn.functional.embedding

    def _embedding(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return embedding(_wrapped(input, weight.shape[0]), weight, *args, **kwargs)

    torch.nn.functional.embedding = _embedding
    torch.index_select = torch.Tensor.index_select = _index_select  # type: ignore[assignment, method-assign]
    torch.Tensor.index_copy_ = _index_copy_  # type: ignore[assignment, method-assign]


# By the operators themselves, not by the methods replaced: torch.compile traces the former only.


def _index_select(
    input: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    index = _wrapped(index, input.shape[dim])
    if out is not None:
        return torch.ops.aten.index_select.out(input, dim, index, out=out)
    return torch.ops.aten.index_select(input, dim, index)


def _index_copy_(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.index_copy_(self, dim, _wrapped(index, self.shape[dim]), source)
