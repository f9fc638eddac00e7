"""Decoders of published shapes with random pruned weights, dense or packed, built layer by layer on their device.

The same seed gives both forms the same weights, and the packed form holds one dense layer at a time.
"""

import torch
from lib.shapes import MODELS, Model
from torch import nn

from proxsparse.inference.linear import SparseLinear, frozen
from proxsparse.models.layers import decoder_blocks
from proxsparse.ops import nm_mask
from proxsparse.patterns import WINDOWED, NMPattern

HEAD = 128  # head_dim of all of them
SIZES = MODELS | {"tiny": Model(2, 64, 32, 128)}  # for rehearsals
# name in SIZES -> transformers' model type, size of the vocabulary, other fields of config.json
KINDS = {
    "mistral-7b-v0.1": ("mistral", 32000, {"sliding_window": None, "max_position_embeddings": 32768}),
    "qwen2.5-14b": ("qwen2", 152064, {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}),
    "openllama-7b-v2": ("llama", 32000, {"max_position_embeddings": 2048}),
    "llama-2-7b": ("llama", 32000, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "tiny": ("qwen2", 260, {}),
}


def random_model(
    name: str,
    blocks: int | None,
    dtype: torch.dtype,
    device: torch.device,
    sparse: bool,
    sigma: float = 0.02,
    pattern: NMPattern = WINDOWED[0],
) -> nn.Module:
    """A causal language model; the layers of its decoder blocks have random pruned weights, packed if `sparse`.

    Args:
        name: a key of KINDS.
        blocks: the number of decoder blocks; None: all of the model.
        sigma: standard deviation of all weights, 0.02 as in the initialisation of these models.
    """
    import transformers

    sizes = SIZES[name]
    model_type, vocabulary, others = KINDS[name]
    head = min(HEAD, sizes.kv)
    config = transformers.AutoConfig.for_model(
        model_type,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=blocks or sizes.blocks,
        num_attention_heads=sizes.hidden // head,
        num_key_value_heads=sizes.kv // head,
        head_dim=head,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        **others,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    torch.manual_seed(0)
    fill_layers_(decoder_blocks(model), dtype, device, sparse, sigma, pattern)
    fill_rest_(model, device, sigma)
    return model.eval().requires_grad_(False)


def fill_layers_(
    decoder: nn.ModuleList, dtype: torch.dtype, device: torch.device, sparse: bool, sigma: float, pattern: NMPattern
) -> None:
    """Gives every nn.Linear its weight, or replaces it with a SparseLinear of the same weight."""
    for name, layer in list(decoder.named_modules()):
        if isinstance(layer, nn.Linear):
            weight = torch.empty(layer.weight.shape, dtype=dtype, device=device).normal_(0, sigma)
            layer.weight = frozen(weight.where(nm_mask(torch.rand_like(weight, dtype=torch.float32), pattern), 0))
            layer.bias = None if layer.bias is None else frozen(torch.zeros_like(layer.bias, device=device))
            if sparse:
                decoder.set_submodule(name, SparseLinear.from_linear(layer, pattern=pattern))


def fill_rest_(model: nn.Module, device: torch.device, sigma: float) -> None:
    """Embeddings and lm_head random, norms one; rotary embeddings, which have no weights, are created again."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            with device:
                model.set_submodule(name, type(module)(config=model.config))
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                tensor = torch.ones_like(parameter, device=device)
                module.register_parameter(key, nn.Parameter(tensor.normal_(0, sigma) if tensor.ndim > 1 else tensor))
