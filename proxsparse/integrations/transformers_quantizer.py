"""Packed checkpoints in transformers: `from_pretrained` loads them directly into SparseLinear layers.

Registered when transformers is imported. Dense weights are never created: the layers are replaced while the model is on
the meta device, and the files contain only packed weights.
"""

from pathlib import Path

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from proxsparse.inference.convert import packed_layers, unsparsify_
from proxsparse.inference.linear import SparseLinear
from proxsparse.inference.packed_checkpoint import QUANT_METHOD, check_description, description, forms
from proxsparse.io.model_files import WEIGHTS_NAME, check_counts, check_folder, check_weights, headers
from proxsparse.models.matching import refuse_codes
from proxsparse.reference.pack import check_packed
from proxsparse_autoload import withdraw

withdraw()


@register_quantization_config(QUANT_METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The quantization_config of a packed checkpoint. Raises ValueError if this version cannot read it."""

    def __init__(self, **entries):
        if "layers" not in entries:
            raise ValueError(
                "PackedConfig: describes the layers of a folder that is packed, and from_pretrained reads it from the "
                "folder; to pack a dense 2:4 model, load it without quantization_config, then call "
                "proxsparse.sparsify_(model)"
            )
        check_description(entries)
        self.quant_method = QUANT_METHOD
        vars(self).update(description(forms(entries)))


@register_quantizer(QUANT_METHOD)
class PackedQuantizer(HfQuantizer):
    """Called by transformers while it loads and saves a packed model."""

    requires_calibration = True  # dense weights cannot be packed while loading: they must be pruned first

    def update_attn_implementation(self, config):
        """Removes what stops programs without proxsparse, and refuses a model of too many layers.

        transformers calls it before it looks for the weights and creates the layers.
        """
        check_counts(config.to_dict(), f"{config.name_or_path}/config.json")
        if hasattr(config, WEIGHTS_NAME):
            delattr(config, WEIGHTS_NAME)
        return config

    update_tp_plan = update_attn_implementation  # the method that transformers 5.17 calls there

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files=None, **_others) -> None:
        """Creates a SparseLinear on the meta device for every packed layer and checks the headers of its tensors.

        Raises ValueError for a state_dict instead of files: missing tensors would not be reported.
        """
        if not checkpoint_files:
            raise ValueError("a packed model cannot be loaded from a state_dict; give its folder")
        if (folder := Path(model.name_or_path)).is_dir():
            check_folder(folder)
        file_headers = headers([Path(file) for file in checkpoint_files])
        for place, form in packed_layers(file_headers, model, vars(self.quantization_config)).values():
            linear = model.get_submodule(place)
            sizes = linear.in_features, linear.out_features, linear.bias is not None
            layer = SparseLinear(*sizes, "meta", linear.weight.dtype, bits=form.bits, pattern=form.pattern)
            model.set_submodule(place, layer)
        check_weights(file_headers, model)
        refuse_codes(file_headers, model)

    def _process_model_after_weight_loading(self, model: nn.Module, **_others) -> nn.Module:
        """Checks every packed layer once: kernels do not check the indices."""
        for name, layer in model.named_modules():
            if not isinstance(layer, SparseLinear):
                continue
            layer.requires_grad_(False)
            try:
                if not (layer.indices.is_meta or layer.values.is_meta):  # offloaded to disk
                    check_packed(layer.values, layer.indices, scales=layer.scales)
            except ValueError as error:
                where = f"{model.name_or_path}: packed layer {name}"
                raise ValueError(f"{where}: {error}; download the model again") from error
        return model

    def _dequantize(self, model: nn.Module, dtype=None) -> nn.Module:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a name after save_pretrained
        return unsparsify_(model) if dtype is None else unsparsify_(model).to(dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """True: dL/dx is computed, so adapters and layers before a packed layer can be trained, see `peft_lora`."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True
