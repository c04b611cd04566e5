# SPDX-License-Identifier: Apache-2.0
import torch

from habana_frameworks.torch import compile, core, fp8, hpex, hpu, internal, on_cpu, utils

__all__ = ["compile", "core", "fp8", "hpex", "hpu", "internal", "torch", "utils"]

# Habana's package adds its device to torch on import, and the plugin relies on that.
torch.hpu = hpu  # type: ignore[attr-defined]
on_cpu.install()
