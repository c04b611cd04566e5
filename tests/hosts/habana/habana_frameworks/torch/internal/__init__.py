# SPDX-License-Identifier: Apache-2.0
from habana_frameworks.torch.internal import bridge_config

__all__ = ["bridge_config"]
