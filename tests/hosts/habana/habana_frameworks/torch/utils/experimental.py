# SPDX-License-Identifier: Apache-2.0
import enum
import os

import torch


class synDeviceType(enum.Enum):
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> synDeviceType | None:
    # Neither, and the plugin takes its CPU settings; a Gaudi 2 where a test wants its compile mode.
    return None if os.environ.get("VLLM_USE_FAKE_HPU", "0") != "0" else synDeviceType.synDeviceGaudi2


def _data_ptr(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()
