# SPDX-License-Identifier: Apache-2.0
from torchvision.transforms.v2 import functional

__all__ = ["functional"]
