"""The prunable layers of the paper's seven models, and of the model that `make prune` prunes.

From the models' config.json: every decoder block has q, k, v and o projections and a gate, up and down projection;
embeddings and lm_head are not pruned. The names are those of the recipes.
"""

from typing import NamedTuple


class Model(NamedTuple):
    """The sizes that determine the shapes of the layers; `kv` = num_key_value_heads * head_dim."""

    blocks: int
    hidden: int
    kv: int
    intermediate: int


MODELS = {
    "mistral-7b-v0.1": Model(32, 4096, 1024, 14336),
    "mistral-7b-v0.3": Model(32, 4096, 1024, 14336),
    "qwen2.5-14b": Model(48, 5120, 1024, 13824),
    "openllama-7b-v2": Model(32, 4096, 4096, 11008),
    "llama-2-7b": Model(32, 4096, 4096, 11008),
    "llama-2-13b": Model(40, 5120, 5120, 13824),
    "llama-3.1-8b": Model(32, 4096, 1024, 14336),
    "smollm2-135m": Model(30, 576, 192, 1536),
}
PAPER = [name for name in MODELS if name != "smollm2-135m"]

Shape = tuple[int, int]  # out_features, in_features


def decoder_block(name: str) -> list[Shape]:
    """The shapes of the seven prunable layers of a decoder block: q, k, v, o, gate, up, down."""
    _, hidden, kv, intermediate = MODELS[name]
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    return [*attention, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]


def prunable_layers(name: str, blocks: int | None = None) -> list[Shape]:
    """The shapes of all prunable layers of the model, or of its first `blocks` decoder blocks."""
    return decoder_block(name) * (MODELS[name].blocks if blocks is None else blocks)


def layer_shapes(names: list[str]) -> list[Shape]:
    """Every shape that a layer of these models has, once, the smallest first."""
    shapes = {shape for name in names for shape in decoder_block(name)}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


def distinct(names: list[str]) -> list[str]:
    """One name for each set of layer shapes, the first."""
    first = {tuple(prunable_layers(name)): name for name in reversed(names)}
    return [name for name in names if name in first.values()]
