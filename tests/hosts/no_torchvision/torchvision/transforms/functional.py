# SPDX-License-Identifier: Apache-2.0
import enum
from typing import Any

import numpy as np
import torch


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(picture: Any) -> torch.Tensor:
    """[channels, height, width] uint8."""
    pixels = torch.from_numpy(np.array(picture))
    return torch.atleast_3d(pixels).permute(2, 0, 1)
