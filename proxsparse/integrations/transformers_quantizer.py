"""Packed checkpoints in transformers: `from_pretrained` loads them straight into SparseLinear layers.

Registered when transformers is imported (`proxsparse.inference`). The dense weights are never made: the packed layers
take the places of the dense ones while the model is on the meta device, and the files hold nothing else.
"""

from pathlib import Path

from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from proxsparse.inference.convert import packed_layers, unsparsify_
from proxsparse.inference.linear import SparseLinear
from proxsparse.inference.packed_checkpoint import FORMAT_VERSION, QUANT_METHOD, check_description
from proxsparse.io.model_files import check_folder, check_weights, headers
from proxsparse.ops.sparse_linear import PATTERN
from proxsparse.reference.pack import check_packed


@register_quantization_config(QUANT_METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The quantization_config of a packed checkpoint. Raises ValueError for one that cannot be read."""

    def __init__(self, **entries):
        check_description(entries)
        self.quant_method = QUANT_METHOD
        self.format_version = FORMAT_VERSION
        self.pattern = str(PATTERN)
        self.layers = entries["layers"]


@register_quantizer(QUANT_METHOD)
class PackedQuantizer(HfQuantizer):
    """What transformers calls while it loads and saves a packed model."""

    requires_calibration = True  # there is no packing while loading: the mask comes from pruning

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files=None, **_others) -> None:
        """SparseLinear on the meta device for every packed layer; its tensors' headers are checked.

        Raises ValueError for a state_dict in the place of files: nobody would see which of its tensors are missing.
        """
        if not checkpoint_files:
            raise ValueError("a packed model is loaded from its folder, not from a state_dict: give the folder")
        if (folder := Path(model.name_or_path)).is_dir():
            check_folder(folder)
        found = headers([Path(file) for file in checkpoint_files])
        for place in packed_layers(found, model, self.quantization_config.layers).values():
            linear = model.get_submodule(place)
            bias = linear.bias is not None
            packed = SparseLinear(linear.in_features, linear.out_features, bias, "meta", linear.weight.dtype)
            model.set_submodule(place, packed)
        check_weights(found, model)

    def _process_model_after_weight_loading(self, model: nn.Module, **_others) -> nn.Module:
        """Every packed layer is checked once; from then on kernels may trust it."""
        for name, layer in model.named_modules():
            if isinstance(layer, SparseLinear):
                layer.requires_grad_(False)
                if not layer.indices.is_meta and not layer.values.is_meta:  # else offloaded to disk
                    refuse_damaged(model, name, layer)
        return model

    def _dequantize(self, model: nn.Module, dtype=None) -> nn.Module:
        return unsparsify_(model) if dtype is None else unsparsify_(model).to(dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """dL/dx is there: what stands before a packed layer learns, and a module of your own beside it.

        peft's LoRA refuses a SparseLinear, which it does not know.
        """
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def refuse_damaged(model: nn.Module, name: str, layer: SparseLinear) -> None:
    """Raises ValueError, with the name of the layer, for places that no packing has made."""
    try:
        check_packed(layer.values, layer.indices)
    except ValueError as error:
        raise ValueError(f"{model.name_or_path}: packed layer {name}: {error}; get the checkpoint again") from error
