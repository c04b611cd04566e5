# SPDX-License-Identifier: Apache-2.0
"""Fast prefill for Gemma 4 on Intel Gaudi: ``vllm serve ... --kv-sharing-fast-prefill``."""

import importlib.util
import logging


def register() -> None:
    """Entry point in the group ``vllm.general_plugins``; vLLM calls it once in every process.

    Does nothing without vllm-gaudi, or where vLLM runs on another platform.
    """
    if importlib.util.find_spec("vllm_gaudi") is None:
        return
    from vllm.platforms import current_platform

    if current_platform.device_name != "hpu":
        return
    try:
        from vllm_gaudi_ext.patches import install
    except ImportError as error:  # of what vLLM is without, too: it must run as it would without this package
        logging.getLogger("vllm.vllm_gaudi_ext").warning("vllm-gaudi-ext does nothing with this vllm: %s", error)
        return
    install()
