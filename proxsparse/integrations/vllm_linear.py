"""Packed linear layers in vLLM.

Rows are packed one by one; each byte of the indices belongs to 8 columns of the weight, and each scale of 4 bits to 64.
So the parts of a fused layer, and those of tensor-parallel processes, are slices of `values`, `indices` and `scales`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import BasevLLMParameter, ChannelQuantScaleParameter, ModelWeightParameter

from proxsparse.inference.packed_checkpoint import Form
from proxsparse.ops import sparse_linear
from proxsparse.reference.pack import check_packed
from proxsparse.reference.quantize import CODES, GROUP, packed_shapes
from proxsparse.reference.windows import expanded_features

COLUMNS = {16: 8, 8: 8, 4: 2 * GROUP}  # columns of the weight in one byte of indices, or with one scale


@register_weight_loader_v2_supported_method
class PackedLinearMethod(LinearMethodBase):
    """y = x W^T + b with a packed weight W [out_features, in_features], by the op of `SparseLinear`.

    Args:
        name: the name of the layer, for messages.
        form: its bits and its pattern.
    """

    def __init__(self, name: str, form: Form):
        self.name, (self.bits, self.pattern) = name, form
        self.parts = 1  # of the fused layer
        self.loaded: dict[str, set] = {}  # tensor -> its parts in the files

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Creates the packed weight and the empty `weight`; `process_weights_after_loading` refuses what stays unset.

        Raises ValueError if the columns of this process do not begin and end between two blocks, two bytes of the
        indices and two scales.
        """
        rows, m = sum(output_partition_sizes), self.pattern.m
        columns, parts = expanded_features(input_size_per_partition, m), input_size // input_size_per_partition
        whole = input_size_per_partition % m == 0 and columns == input_size_per_partition // m * (2 * m - 4)
        if parts > 1 and not (whole and columns % COLUMNS[self.bits] == 0):
            raise ValueError(
                f"{self.name}: {parts} tensor-parallel processes get {input_size_per_partition} of {input_size} "
                f"columns each, but a {self.pattern} layer packed with {self.bits} bits cannot be divided there: their "
                f"packed columns must be a multiple of {COLUMNS[self.bits]} (now {columns}), without padding; use a "
                "smaller --tensor-parallel-size, in Python tensor_parallel_size"
            )
        self.parts = len(output_partition_sizes)
        dtypes = {"values": CODES.get(self.bits, params_dtype), "indices": torch.uint8, "scales": params_dtype}
        for name, shape in packed_shapes(rows, columns, self.bits).items():
            data = torch.empty(shape, dtype=dtypes[name])
            load = self.recording(name, extra_weight_attrs["weight_loader"])
            parameter = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)
            if name == "scales" and self.bits == 8:  # of a whole row, which is in every process
                parameter = ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=load)
            layer.register_parameter(name, parameter)
        empty = torch.empty(0, dtype=params_dtype)
        layer.register_parameter("weight", BasevLLMParameter(data=empty, weight_loader=self.load_weight))

    def recording(self, name: str, load: Callable) -> Callable:
        """The loader `load` of the tensor `name`, which also notes the part: vLLM accepts missing ones."""
        loaded = self.loaded[name] = set()

        def load_and_note(parameter: nn.Parameter, weight: Tensor, part=None, **named_part) -> None:
            if name == "scales" and not weight.is_floating_point():
                raise ValueError(f"{self.name}: its scales are {weight.dtype}; pack the pruned folder again")
            if name == "values" and weight.is_floating_point() != parameter.is_floating_point():
                raise ValueError(
                    f"{self.name}: its values are {weight.dtype}, but config.json lists it with {self.bits} bits; "
                    "download the model again"
                )
            load(parameter, weight, *(() if part is None else (part,)), **named_part)
            part = next(iter(named_part.values()), part)
            loaded.update(range(self.parts) if part is None else part if isinstance(part, tuple) else (part,))

        return load_and_note

    def load_weight(self, parameter: nn.Parameter, loaded: Tensor, *_part) -> None:
        """Accepts the empty weight of a packed layer. Raises ValueError for a dense one."""
        if loaded.numel():
            raise ValueError(
                f"{self.name}: config.json lists this layer as packed, but the files have a dense weight "
                f"{list(loaded.shape)}; download the checkpoint again, or pack it again"
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raises ValueError for tensors that are missing or damaged: kernels do not check the indices."""
        scales = layer.scales.data if self.bits in CODES else None
        try:
            for name, loaded in self.loaded.items():
                if len(loaded) < self.parts:
                    raise ValueError(f"{name}: {len(loaded)} of {self.parts} parts are in the files")
            check_packed(layer.values.data, layer.indices.data, scales=scales)
        except ValueError as error:
            raise ValueError(f"packed layer {self.name}: {error}; download the model again") from error

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scales = layer.scales if self.bits in CODES else None
        return sparse_linear(x, layer.values, layer.indices, bias, scales=scales, pattern=self.pattern)
