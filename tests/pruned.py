"""Weights, layers and tiny models that are 2:4, what everything packed starts from; and how exact a product must be."""

import torch
from safetensors.torch import load_file
from tiny_models import byte_tokenizer, save, tiny_model
from torch import nn
from torch.nn.functional import linear

from proxsparse import NMPattern
from proxsparse.ops import dequantize_nm, pack_nm, quantize_nm, unpack_nm
from proxsparse.pack import main as pack


def pruned_weight(shape, dtype=torch.float32):
    """Random numbers; of every four the smaller two are +0.0."""
    return prune(torch.randn(shape)).to(dtype)


def prune(weight, pattern="2:4"):
    """The weight with the smallest m - n of every m set to +0.0."""
    pattern, pruned = NMPattern.parse(pattern), weight.clone()
    blocks = pattern.blocks(pruned)
    blocks.scatter_(-1, blocks.abs().topk(pattern.m - pattern.n, largest=False).indices, 0.0)
    return pruned


def assert_as_good_as_dense(y, x, weight, bias=None):
    """y = x W^T + b up to twice the error of torch's dense layer, an ulp of the largest output, and one of a sum.

    The sum is the largest of |x| |W|^T, its precision that of x, at least float32. A weight in float64, such as that of
    codes, is rounded to the dtype of x for torch.
    """
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    if exact.numel():
        allowed = 2 * (linear(x, weight.to(x.dtype), bias).double() - exact).abs().max()
        allowed += torch.finfo(x.dtype).eps * exact.abs().max()
        largest_sum = linear(x.double().abs(), weight.double().abs()).max()
        allowed += torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps * largest_sum
        error = (y.double() - exact).abs().max()
        assert error <= allowed, f"{error} > {allowed}: {x.dtype} {list(x.shape)} times {list(weight.shape)}"


@torch.no_grad()
def prune_(module: nn.Module, but: tuple[str, ...] = ("lm_head",), pattern="2:4") -> nn.Module:
    """Prunes all nn.Linear layers, except those whose name contains one of `but`."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not any(part in name for part in but):
            layer.weight.copy_(prune(layer.weight, pattern))
    return module


def quantized(weight, bits):
    """Codes, indices and scales of a 2:4 weight, and the weight that they stand for, in float64; bits: 8 or 4."""
    values, indices = pack_nm(weight)
    codes, scales = quantize_nm(values, bits)
    return codes, indices, scales, unpack_nm(dequantize_nm(codes, scales.double()), indices)


def pruned_linear(in_features=24, out_features=7, bias=True, dtype=torch.float32, pattern="2:4") -> nn.Linear:
    """An N:M layer with random weights."""
    return prune_(nn.Linear(in_features, out_features, bias, dtype=dtype), pattern=pattern)


def pruned_model(name="llama", dtype=torch.float32, pattern="2:4"):
    """The tiny model of that name, N:M except lm_head."""
    return prune_(tiny_model(name, dtype), pattern=pattern)


def save_pruned_model(folder, name="llama", dtype=torch.bfloat16, pattern="2:4"):
    """The same as a folder, with a tokenizer."""
    return save(pruned_model(name, dtype, pattern), folder)


def tensors_of(folder):
    """Every tensor of every model file of a folder."""
    paths = [path for path in folder.glob("*.safetensors") if path.name != "masks.safetensors"]
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def assert_pruned(before, after, masks, patterns, updated=False):
    """Every layer with a mask is exactly N:M with +0.0 elsewhere, kept bits equal unless updated; the rest is equal.

    before, after: parameters by name; masks, patterns: of the layers by name.
    """
    bits = lambda tensor: tensor.detach().contiguous().view(torch.uint8)  # noqa: E731 (tells -0.0 from +0.0)
    assert (before.keys(), masks.keys()) == (after.keys(), patterns.keys())
    for name, weight in after.items():
        pretrained, mask = before[name], masks.get(layer := name.removesuffix(".weight"))
        assert weight.dtype == pretrained.dtype
        if mask is None:
            assert torch.equal(bits(weight), bits(pretrained)), name
            continue
        pattern = NMPattern.parse(patterns[layer])
        assert (pattern.blocks(mask).sum(-1) == pattern.n).all(), name
        assert (bits(weight[~mask]) == 0).all(), name
        assert torch.equal(bits(weight[mask]), bits(pretrained[mask])) != updated, name


def packed_copy(folder, name="llama", dtype=torch.bfloat16, flags=(), pattern="2:4"):
    """A pruned tiny model: its dense and its packed folder."""
    dense = save_pruned_model(folder / "dense", name, dtype, pattern)
    assert pack([str(dense), "--output_dir", str(folder / "packed"), *flags]) == 0
    return dense, folder / "packed"


def chat_folders(folder, pattern="2:4"):
    """The same in fp32; the packed folder has a chat template."""
    folders, tokenizer = packed_copy(folder, dtype=torch.float32, pattern=pattern), byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(folders[1])
    return folders
