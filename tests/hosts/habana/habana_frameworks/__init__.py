# SPDX-License-Identifier: Apache-2.0
"""Stand-in for Habana's `habana_frameworks`: what the vllm-gaudi plugin imports of it, computed on a CPU.

Only the interface is taken from Habana's package. The kernels are plain PyTorch, in float32 and deterministic.
"""
