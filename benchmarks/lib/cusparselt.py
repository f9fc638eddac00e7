"""cuSPARSELt, the 2:4 matmul of NVIDIA's library in torch: a contender of linear_speed.py, not a backend of proxsparse.

A layer with it would hold the weight in a second format. torch creates the descriptors and the plan of a multiplication
on the host in every call (ATen, cuSPARSELtOps.cpp), so only a captured CUDA graph shows the speed of the kernels. The
first call for each number of rows runs all algorithms to find the fastest and waits for them, which is not possible in
a capture: call it once before.
"""

import torch
from lib.codes import Contender
from lib.measure import LinearWeights
from torch import Tensor

from proxsparse.ops.sparse_linear import pad_rows

NAME = "cusparselt"
# torch.sparse.SparseSemiStructuredTensorCUSPARSELT: multiples of out_features and in_features, and of the rows of x.
WEIGHT_STEP, ROW_STEP = 16, 8


def contender(weights: LinearWeights) -> dict[str, Contender]:
    """cuSPARSELt under its name and bits; {} if it cannot multiply by these weights."""
    if not is_supported(weights.dense[0]):
        return {}
    algorithms = {}  # rows of x -> arguments of torch._cslt_sparse_mm

    def multiply(x: Tensor, compressed: Tensor) -> Tensor:
        columns = pad_rows(x, ROW_STEP).t()
        if len(x) not in algorithms:
            algorithms[len(x)] = fastest_algorithm(compressed, columns)
        return torch._cslt_sparse_mm(compressed, columns, transpose_result=True, **algorithms[len(x)])[: len(x)]

    copies = [(torch._cslt_compress(dense),) for dense in weights.dense]
    return {f"{NAME}:16": Contender(copies, multiply, weights.dense[0].double())}


def is_supported(weight: Tensor) -> bool:
    """Whether the library is there and multiplies by this weight."""
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and all(size % WEIGHT_STEP == 0 for size in weight.shape)
        and torch.backends.cusparselt.is_available()
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    )


def fastest_algorithm(compressed: Tensor, columns: Tensor) -> dict[str, int]:
    """The fastest algorithm with its split of in_features, which torch._cslt_sparse_mm_search does not return."""
    number, split_k, mode, _count = torch._C._cusparselt.mm_search(compressed, columns, None, None, None, True)
    return {"alg_id": number, "split_k": split_k, "split_k_mode": mode}
