# SPDX-License-Identifier: Apache-2.0
from vllm.model_executor.models.registry import ModelRegistry


def register_model() -> None:
    ModelRegistry.register_model(
        "Gemma4ForConditionalGeneration", "vllm_gaudi.models.gemma4:HpuGemma4ForConditionalGeneration"
    )
