# SPDX-License-Identifier: Apache-2.0
import torch


class FusedRMSNorm:
    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalizes the last dimension of `x` in float32."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        return (y * weight.float()).to(x.dtype)
