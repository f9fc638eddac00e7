"""The sizes of a model, computed from its config: no weights are read."""

import torch
from torch import nn

from proxsparse.errors import InputError
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.loading import locate, reason_of
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.run.config import TrainConfig

# Public facts from config.json files, so that a plan needs neither a network nor access to gated models.
SETTINGS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
TIED = {"tie_word_embeddings": True}
KNOWN = {  # Hub id -> model_type, SETTINGS, other settings; all are stored in two bytes per weight
    "mistralai/Mistral-7B-v0.1": ("mistral", (4096, 14336, 32, 32, 8, 32000, 32768), {"sliding_window": 4096}),
    "mistralai/Mistral-7B-v0.3": ("mistral", (4096, 14336, 32, 32, 8, 32768, 32768), {"sliding_window": None}),
    "Qwen/Qwen2.5-14B": ("qwen2", (5120, 13824, 48, 40, 8, 152064, 131072), {}),
    "openlm-research/open_llama_7b_v2": ("llama", (4096, 11008, 32, 32, 32, 32000, 2048), {}),
    "meta-llama/Llama-2-7b-hf": ("llama", (4096, 11008, 32, 32, 32, 32000, 4096), {}),
    "meta-llama/Llama-2-13b-hf": ("llama", (5120, 13824, 40, 40, 40, 32000, 4096), {}),
    "meta-llama/Llama-3.1-8B": ("llama", (4096, 14336, 32, 32, 8, 128256, 131072), {}),
    "meta-llama/Llama-3.2-1B": ("llama", (2048, 8192, 16, 32, 8, 128256, 131072), TIED),
    "meta-llama/Llama-3.1-70B": ("llama", (8192, 28672, 80, 64, 8, 128256, 131072), {}),
    "meta-llama/Llama-3.1-405B": ("llama", (16384, 53248, 126, 128, 8, 128256, 131072), {}),
    "HuggingFaceTB/SmolLM2-135M": ("llama", (576, 1536, 30, 9, 3, 49152, 8192), TIED),
}
# An attention for which transformers builds no mask: with fake tensors it cannot detect that there is no padding.
CAUSAL = "causal_without_mask"


class Shape:
    """The sizes of `config.model`, in numbers of weights unless stated otherwise.

    Raises:
        InputError: the model or its config is missing, or no layer can be pruned.
    """

    def __init__(self, config: TrainConfig):
        model, self.file_dtype, self.mapped, self.source = meta_model(config.model)
        self.file_bytes = self.file_dtype.itemsize
        layers = prunable_layers(model, config.pattern, config.include, config.exclude)
        blocks, settings = decoder_blocks(model), model.config.get_text_config()
        heads = settings.num_attention_heads
        head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        sizes = [layer.weight.numel() for layer in layers.values()]
        self.blocks, self.layers = len(blocks), len(layers)  # decoder blocks, prunable layers
        self.weights, self.prunable, self.largest_layer = numel(model), sum(sizes), max(sizes)
        self.block = max(map(numel, blocks))  # the largest decoder block
        self.outside = self.weights - numel(blocks)  # everything outside the decoder blocks
        linear = (module for module in model.modules() if isinstance(module, nn.Linear))
        self.linear = sum(layer.weight.numel() for layer in linear)  # in matrix products, including lm_head
        self.attention = heads * head_dim * self.blocks  # width of the attention, summed over the blocks
        self.prunable_names = {f"{name}.weight" for name in layers}
        del blocks[2:]
        settings.num_hidden_layers = len(blocks)
        self.two_blocks = model  # the model with its first two decoder blocks, on the meta device


def numel(module: nn.Module) -> int:
    """The number of weights of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def meta_model(name: str) -> tuple[nn.Module, torch.dtype, bool, str]:
    """The model as `load_model` would return it, but on the meta device.

    Returns:
        The model; dtype of the weights in its files; whether W0 can stay in these files; where the config was found.
    """
    import transformers

    source, gguf_file = locate(name)
    options = {"gguf_file": gguf_file} if gguf_file else {}
    found = f"{gguf_file or 'config.json'} of {source}"
    try:
        if name in KNOWN and source == name:
            model_type, values, others = KNOWN[name]
            settings = dict(zip(SETTINGS, values, strict=True)) | others
            config = transformers.AutoConfig.for_model(model_type, **settings, dtype=torch.bfloat16)
            found = "proxsparse's table of architectures"
        else:
            try:  # first without the Hub: without a network a request takes half a minute to fail
                config = transformers.AutoConfig.from_pretrained(
                    source, local_files_only=True, trust_remote_code=False, **options
                )
            except OSError:
                config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        transformers.AttentionInterface.register(CAUSAL, transformers.AttentionInterface()["sdpa"])
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # many kinds of errors, as in load_model
        raise InputError(
            f"--plan: cannot build model {name!r} from its config ({reason_of(error)}); give a folder with a complete "
            "config.json"
        ) from error
    dtype = torch.float32 if gguf_file else getattr(config, "dtype", None) or torch.float32
    return unfold_linears_(model), dtype, gguf_file is None, found
