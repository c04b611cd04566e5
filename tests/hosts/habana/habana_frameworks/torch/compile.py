# SPDX-License-Identifier: Apache-2.0
"""The torch.compile backend that the plugin and its platform name: runs each graph as it was traced."""

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import register_backend


@register_backend(name="hpu_backend")
def hpu_backend(graph: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Callable:
    return graph.forward
