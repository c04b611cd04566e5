# SPDX-License-Identifier: Apache-2.0
"""Every hook of this package into vllm and vllm-gaudi, each with its reason, in the order in which they are set.

When the package is registered: the registry entries of the Gemma 4 models. With the flag on, in the process that
accepts requests: what is refused. With the flag on, in the process that loads the model: the classes of the model and
of its attention, and how many rows the runner reads. Of no use once the code is part of vllm-gaudi.
"""

import functools
from typing import Any

import vllm_gaudi.models
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, Gemma4Config
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_gaudi_ext import compat
from vllm_gaudi_ext.config import FLAG, LEFT_TO_PLUGIN, Refused, decide

logger = init_logger(f"vllm.{__name__}")  # a child of the logger that vLLM configures

MODELS = {
    "Gemma4ForConditionalGeneration": "vllm_gaudi_ext.models.gemma4:HpuGemma4FastPrefillForConditionalGeneration",
    "Gemma4ForCausalLM": "vllm_gaudi_ext.models.gemma4:HpuGemma4FastPrefillForCausalLM",
}


def install() -> None:
    """Register the models and the check of the engine's settings. Calling it again changes nothing.

    Where vllm-gaudi brings fast prefill itself, or has changed so that our models cannot be imported, its own models
    stay registered.
    """
    for architecture in MODELS:
        MODELS_CONFIG_MAP[architecture] = Gemma4FastPrefillConfig
    if compat.plugin_has_fast_prefill():
        return
    findings = compat.missing_imports()
    if findings:
        reason = "; ".join(findings)
        logger.warning_once("vllm-gaudi-ext does not fit what is installed, so %s is refused: %s", FLAG, reason)
        return
    _register_models()
    _register_models_after_plugin()


class Gemma4FastPrefillConfig(Gemma4Config):
    """The hook that vLLM calls while it builds the configuration of a Gemma 4 engine.

    It is the first place at which the flag is known: in the process that accepts requests, before any weight is loaded.
    """

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().verify_and_update_config(vllm_config)
        if not _has_flag(vllm_config):
            return
        verdict = decide(vllm_config)
        if isinstance(verdict, Refused):
            raise ValueError(verdict.message)
        if verdict is LEFT_TO_PLUGIN:
            logger.info_once("Fast prefill is left to the plugin: %s.", LEFT_TO_PLUGIN.reason)
            return
        _refuse_prompt_logprobs()


def _has_flag(vllm_config: VllmConfig) -> bool:
    """Whether this is a Gemma 4 engine with the flag: others in the same process are left alone."""
    return vllm_config.cache_config.kv_sharing_fast_prefill and vllm_config.model_config.architecture in MODELS


def _register_models() -> None:
    for architecture, model_class in MODELS.items():
        ModelRegistry.register_model(architecture, model_class)


@functools.cache
def _register_models_after_plugin() -> None:
    """Keep our registrations when vllm-gaudi registers its models later than this package, or again.

    The last registration of an architecture wins, and vLLM loads plugins in the order in which importlib finds them.
    """
    plugin_register_model = vllm_gaudi.models.register_model

    @functools.wraps(plugin_register_model)
    def register_model() -> None:
        plugin_register_model()
        _register_models()

    vllm_gaudi.models.register_model = register_model


class PromptLogprobsError(VLLMValidationError, ValueError):
    """What vLLM's server answers with status 400, and in every version a ValueError."""


@functools.cache
def _refuse_prompt_logprobs() -> None:
    """Refuse requests for prompt logprobs, which read every prompt token's hidden state, before they reach an engine.

    vLLM refuses them with the flag on its asynchronous path alone, and lets ``prompt_logprobs=0`` pass; the plugin's
    engine does not survive either on Gemma 4.
    """
    validate_params = InputProcessor._validate_params

    @functools.wraps(validate_params)
    def _validate_params(self: InputProcessor, params: Any, *args: Any, **kwargs: Any) -> Any:
        if _has_flag(self.vllm_config) and isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            raise PromptLogprobsError(
                f"prompt_logprobs (and echo with logprobs) reads every prompt token, which {FLAG} skips: "
                f"leave it out of the request, or start the server without {FLAG}.")
        return validate_params(self, params, *args, **kwargs)  # None, and from vLLM 0.33 on parameters

    InputProcessor._validate_params = _validate_params


def disable_upstream_fast_prefill(model: Any) -> None:
    """Send ``Gemma4Model.forward`` down its normal path, and free what its own fast prefill holds for CUDA graphs.

    Upstream's path asserts GPU attention metadata. Its buffers have ``max_num_batched_tokens`` rows of hidden states
    and of every layer's per-layer input.
    """
    model.fast_prefill_enabled = False
    for buffer in ("positions", "hidden_states", "per_layer_inputs"):
        if hasattr(model, buffer):
            delattr(model, buffer)


def swap_model_class(language_model: Any, model_class: type) -> None:
    """Give ``language_model.model``, which vLLM has built, a class derived from the plugin's."""
    from vllm_gaudi.models.gemma4 import HpuGemma4Model, _apply_hpu_gemma4_patches

    if not isinstance(language_model.model, HpuGemma4Model):  # text-only, which the plugin leaves as vLLM has it
        _apply_hpu_gemma4_patches(language_model)
    language_model.model.__class__ = model_class


def swap_attention_backend(attention: Any, backend: Any) -> None:
    """Give a layer's attention another backend: vLLM selects one for the whole model when it builds the layers."""
    attention.attn_backend = backend
    attention.impl.__class__ = backend.get_impl_cls()


def restore_class(model: Any, registered_class: type) -> None:
    """Have a model be of the class that it would be of without this package, with and without the flag.

    vLLM's classes derived from the registered one (for pooling) stay as they are.
    """
    if type(model) is registered_class:
        model.__class__ = registered_class.__mro__[1]


@functools.cache
def mark_passes_read_at_several_rows() -> None:
    """Have the runner mark the prompt passes of which it reads more than the last row of a sequence.

    It does so for tokens that are computed again past the end of a prompt.
    """
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    from vllm_gaudi_ext.prompt_pass import mark_read_at_several_rows

    form_prefill_batch = HPUModelRunner._form_prefill_batch

    @functools.wraps(form_prefill_batch)
    def _form_prefill_batch(self: Any, contents: Any) -> Any:
        batch = form_prefill_batch(self, contents)
        if _has_flag(self.vllm_config) and any(len(positions) > 1 for positions in contents.logits_positions):
            for attn_metadata in batch.attn_metadata:
                mark_read_at_several_rows(attn_metadata)
        return batch

    HPUModelRunner._form_prefill_batch = _form_prefill_batch
