"""The quantization_config of packed checkpoints in vLLM; `vllm_plugin` registers it.

vLLM fuses projections: q, k, v into qkv_proj, gate and up into gate_up_proj. config.json lists the parts.
"""

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from proxsparse.inference.packed_checkpoint import QUANT_METHOD, Form, check_description, forms


class PackedConfig(QuantizationConfig):
    """The quantization_config of a packed checkpoint. Raises ValueError if this version cannot read it."""

    def __init__(self, entries: dict):
        super().__init__()
        check_description(entries)
        self.layers = forms(entries)

    @classmethod
    def from_config(cls, config: dict) -> "PackedConfig":
        return cls(config)

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # the op selects a kernel for the GPU, the reference at least

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json of the model has everything

    def apply_vllm_mapper(self, hf_to_vllm_mapper) -> None:
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear layer: packed, or vLLM's dense one; None for other modules.

        Raises:
            ValueError: the parts of a fused layer differ, or the layer is packed and is not a linear layer.
        """
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from proxsparse.integrations.vllm_linear import PackedLinearMethod  # late: it is needed by packed models only

        form = self.form_of(prefix)
        if not isinstance(layer, LinearBase):
            if form:
                name = prefix.rpartition(".")[2]
                raise ValueError(
                    f"{prefix}: the layer is packed, but in vLLM it is a {type(layer).__name__}, which must be dense; "
                    "unpack the checkpoint and pack it again without this layer (proxsparse pack --exclude "
                    f"{name}, in Python sparsify_(model, exclude=[{name!r}]))"
                )
            return None
        return PackedLinearMethod(prefix, form) if form else UnquantizedLinearMethod()

    def form_of(self, prefix: str) -> Form | None:
        """How the layer `prefix` of vLLM is packed, with all its parts if it is fused; None if it is dense.

        Raises ValueError if the parts differ.
        """
        parent, _, name = prefix.rpartition(".")
        parts = [f"{parent}.{part}" if parent else part for part in self.packed_modules_mapping.get(name, [name])]
        part_forms = [self.layers.get(part) for part in parts]
        if len(set(part_forms)) > 1:
            kinds = [f"{form.pattern} with {form.bits} bits" if form else "dense" for form in part_forms]
            listed = ", ".join(f"{part} is {kind}" for part, kind in zip(parts, kinds, strict=True))
            raise ValueError(
                f"{prefix}: vLLM fuses its parts into one layer, but {listed}; prune and pack all of them alike, or "
                "none (proxsparse pack --exclude, in Python sparsify_(model, exclude=...))"
            )
        return part_forms[0]
