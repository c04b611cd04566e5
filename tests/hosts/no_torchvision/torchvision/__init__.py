# SPDX-License-Identifier: Apache-2.0
"""Lets modules that import torchvision be imported where it is not installed: text requests call none of it, and
a picture that needs no resizing one function."""

from torchvision import transforms

__all__ = ["transforms"]
__version__ = "0.0.0"
