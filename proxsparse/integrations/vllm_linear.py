"""Packed linear layers in vLLM.

Rows are packed one by one, and each byte of the indices belongs to 8 columns of the weight. So the parts of a fused
layer, and those of tensor-parallel processes, are slices of `values` and `indices`.
"""

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import BasevLLMParameter, ModelWeightParameter

from proxsparse.ops import sparse_linear
from proxsparse.reference.pack import check_packed

COLUMNS = 8  # columns of the weight in one byte of indices


@register_weight_loader_v2_supported_method
class PackedLinearMethod(LinearMethodBase):
    """y = x W^T + b with a packed 2:4 weight W [out_features, in_features], by the op of `SparseLinear`.

    Args:
        name: the name of the layer, for messages.
    """

    def __init__(self, name: str):
        self.name = name

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
        """Creates `values`, `indices` and the empty `weight`, filled with what `process_weights_after_loading` refuses.

        Raises ValueError if the columns of this process do not begin and end between two bytes of the indices.
        """
        columns, rows = input_size_per_partition, sum(output_partition_sizes)
        if columns != input_size and columns % COLUMNS:
            raise ValueError(
                f"{self.name}: {input_size // columns} tensor-parallel processes get {columns} of {input_size} columns "
                f"each, but the columns of a packed layer can only be divided into multiples of {COLUMNS}; use a "
                "smaller --tensor-parallel-size"
            )
        values = torch.full((rows, columns // 2), torch.nan, dtype=params_dtype)
        indices = torch.zeros(rows, -(-columns // COLUMNS), dtype=torch.uint8)
        load = extra_weight_attrs["weight_loader"]
        for name, data in (("values", values), ("indices", indices)):
            parameter = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)
            layer.register_parameter(name, parameter)
        layer.register_parameter("weight", BasevLLMParameter(data=values.new_empty(0), weight_loader=self.load_weight))

    def load_weight(self, parameter: nn.Parameter, loaded: Tensor, *_part) -> None:
        """Accepts the empty weight of a packed layer. Raises ValueError for a dense one."""
        if loaded.numel():
            raise ValueError(
                f"{self.name}: config.json lists this layer as packed, but the files have a dense weight "
                f"{list(loaded.shape)}; download the checkpoint again, or pack it again"
            )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raises ValueError for tensors that are missing or damaged: kernels do not check the indices."""
        try:
            if layer.values.isnan().any():
                raise ValueError("values: some are missing or NaN")
            check_packed(layer.values.data, layer.indices.data)
        except ValueError as error:
            raise ValueError(f"packed layer {self.name}: {error}; download the model again") from error

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return sparse_linear(x, layer.values, layer.indices, bias)
