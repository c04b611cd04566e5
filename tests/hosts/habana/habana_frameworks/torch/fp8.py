# SPDX-License-Identifier: Apache-2.0
"""The float8 operators `torch.ops.hpu.*` that the plugin's FP8 KV cache and matrix products call."""

import torch

_LIBRARY = torch.library.Library("hpu", "DEF")


def _define(schema: str):
    def register(function):
        _LIBRARY.define(schema)
        _LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
        return function

    return register


@_define("cast_to_fp8_v2(Tensor x, float scale, bool stochastic, bool is_amax, ScalarType dtype) -> (Tensor, Tensor)")
def cast_to_fp8_v2(x, scale, stochastic, is_amax, dtype):
    """Rounds `x * scale` to the nearest `dtype`; what is too large becomes its largest number."""
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype), torch.empty(0)


@_define("cast_from_fp8(Tensor x, float scale, ScalarType dtype) -> Tensor")
def cast_from_fp8(x, scale, dtype):
    return (x.float() * scale).to(dtype)


@_define(
    "fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype, "
    "float? A_scale_inv, float? B_scale_inv, Tensor? bias, bool accumulate) -> Tensor"
)
def fp8_gemm_v2(A, trans_A, B, trans_B, D, out_dtype, A_scale_inv, B_scale_inv, bias, accumulate):
    if trans_A or trans_B or D is not None or bias is not None or accumulate:
        raise NotImplementedError("fp8_gemm_v2 on CPU: transposed, accumulating or with a bias")
    return (A.float() * (A_scale_inv or 1.0) @ (B.float() * (B_scale_inv or 1.0))).to(out_dtype)
