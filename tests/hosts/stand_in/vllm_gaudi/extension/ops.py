# SPDX-License-Identifier: Apache-2.0
from typing import Any


class LoraMask:
    """Where LoRA layers find the mask of the pass, [tokens, max_loras * max_rank]; None without LoRA."""

    lora_mask: Any = None

    @staticmethod
    def setLoraMask(mask: Any) -> None:
        LoraMask.lora_mask = mask

    @staticmethod
    def getLoraMask() -> Any:
        return LoraMask.lora_mask
