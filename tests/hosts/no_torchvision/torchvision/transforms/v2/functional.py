# SPDX-License-Identifier: Apache-2.0
from torchvision.transforms.functional import InterpolationMode, pil_to_tensor

__all__ = ["InterpolationMode", "pil_to_tensor"]
