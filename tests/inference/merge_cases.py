"""Modules with projections to merge, and how equal the outputs of a merged one must be."""

import copy
from importlib.util import find_spec

import pytest
import torch
from pruned import pruned_linear
from torch import nn

from proxsparse.inference.convert import sparsify_
from proxsparse.inference.merge import Group, MergedPart, merge_projections_

each_form = pytest.mark.parametrize("form", ["dense", "sparse"])


class Attention(nn.Module):
    """Reads one input three times."""

    def __init__(self, bias=True, dtype=torch.float32):
        super().__init__()
        for name, rows in (("q_proj", 24), ("k_proj", 8), ("v_proj", 16)):
            setattr(self, name, pruned_linear(32, rows, bias, dtype))

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


def attention(form="sparse", merged=True, **options):
    """The module, and one with equal weights that is never merged."""
    module = Attention(**options).requires_grad_(False)
    if form == "sparse":
        sparsify_(module)
    plain = copy.deepcopy(module)
    return (merge_projections_(module) if merged else module), plain


def groups(model) -> list[Group]:
    found = {id(part.group): part.group for part in model.modules() if isinstance(part, MergedPart)}
    return [group for group in found.values() if group.layer is not None]


def assert_same(found, expected, form="dense"):
    """Equal bits where our kernel multiplies; BLAS may add in another order for another number of rows of W."""
    if form == "sparse" and found.dtype == torch.float32 and find_spec("proxsparse._C"):
        assert torch.equal(found, expected)
    else:
        assert found.dtype == expected.dtype
        tolerance = 2e-2 if found.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
