"""The op `proxsparse::prox_nm_list_`: the prox of many weights, with as few kernel launches as possible."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from proxsparse.ops import backends  # noqa: F401 (registers all kernels of prox_nm_, which are listed below)
from proxsparse.ops.prox import check_prox_arguments, whole_rows, write_back
from proxsparse.ops.registry import get_kernel, list_backends, register_kernel, select
from proxsparse.patterns import NMPattern, PatternLike

torch.library.define("proxsparse::prox_nm_list_", "(Tensor(a!)[] weights, float[] reg_lambdas, int n, int m) -> ()")


@torch.library.impl("proxsparse::prox_nm_list_", "CompositeExplicitAutograd")
def _prox_nm_list_(weights: list[Tensor], reg_lambdas: list[float], n: int, m: int) -> None:
    groups: dict[tuple, list[tuple[Tensor, Tensor, float]]] = {}
    for weight, reg_lambda in zip(weights, reg_lambdas, strict=True):
        if reg_lambda != 0 and weight.numel() != 0:
            group = groups.setdefault((weight.device, weight.dtype), [])
            group.append((weight, whole_rows(weight, m), reg_lambda))
    for group in groups.values():
        originals, dense, lambdas = zip(*group, strict=True)
        select("prox_nm_list_", dense[0], n, m).run(dense, lambdas, n, m)
        for weight, result in zip(originals, dense, strict=True):
            write_back(weight, result)


torch.library.register_fake("proxsparse::prox_nm_list_", lambda *arguments: None)


def _one_by_one(weights: Sequence[Tensor], reg_lambdas: Sequence[float], n: int, m: int) -> None:
    for weight, reg_lambda in zip(weights, reg_lambdas, strict=True):
        select("prox_nm_", weight, reg_lambda, n, m).run(weight, reg_lambda, n, m)


def _supports(backend: str, weight: Tensor, *pattern: int) -> str | None:
    return get_kernel("prox_nm_", backend).supports(weight, 1.0, *pattern)


for _backend in list_backends("prox_nm_"):
    if _backend not in list_backends("prox_nm_list_"):  # Triton's kernel takes the whole list in one launch
        register_kernel("prox_nm_list_", _backend, supports=partial(_supports, _backend))(_one_by_one)


@torch.no_grad()
def prox_nm_list_(weights: Sequence[Tensor], reg_lambdas: Sequence[float], pattern: PatternLike = "2:4") -> None:
    """W_i <- argmin_V 1/2 ||V - W_i||_F^2 + lambda_i * Reg_{N:M}(V) for every weight, in place, as `prox_nm_` does.

    The Triton backend uses one launch for all weights with the same device and dtype; other backends process one weight
    at a time. The results are the same. Triton is first for every lambda: for small weights a single launch saves more
    time than a faster kernel, and the magnitude of the weights is unknown, because they may already be scaled.

    Args:
        weights: each [..., in_features], any strides, dtypes and devices; they must not overlap. Changed in place.
        reg_lambdas: one lambda_1 >= 0 per weight, in units of 1 / |w|^(N-1); 0 does not change the weight.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
    Raises:
        ValueError: the numbers of weights and lambdas differ; a tensor occurs twice; or as `prox_nm_`, with the
            position in the list.
    """
    pattern = NMPattern.parse(pattern)
    if len(weights) != len(reg_lambdas):
        raise ValueError(f"{len(weights)} weights and {len(reg_lambdas)} lambdas: pass one lambda per weight")
    if len(set(weights)) != len(weights):  # tensors hash by identity; Dynamo of torch 2.11 cannot trace id()
        raise ValueError("a weight is in the list twice; pass every weight once, also if it is tied")
    for i, (weight, reg_lambda) in enumerate(zip(weights, reg_lambdas, strict=True)):
        try:
            check_prox_arguments(weight, reg_lambda, pattern)
        except ValueError as error:
            raise ValueError(f"weights[{i}]: {error}") from None
    torch.ops.proxsparse.prox_nm_list_(list(weights), [float(x) for x in reg_lambdas], pattern.n, pattern.m)
