"""Tiny random language models of several families, in memory or as Hugging Face folders with a byte-level tokenizer."""

import json
from pathlib import Path

import torch

COMMON = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GEMMA3 = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
TINY = {"hidden_size": 16, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
# name -> (transformers model type, what differs from COMMON); those in MIXED call their blocks with different arguments
MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "phi3": ("phi3", {}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "qwen2-mixed": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "gemma2-mixed": ("gemma2", {"head_dim": 8, "sliding_window": 4}),
    "gemma3-mixed": ("gemma3_text", GEMMA3),
    "gemma3-composite-mixed": (  # what the large checkpoints are: a text model inside one that also sees
        "gemma3",
        {"text_config": COMMON | GEMMA3, "vision_config": {"num_hidden_layers": 1, "intermediate_size": 16, **TINY}},
    ),
}
NOT_PACKED = {"gpt2", "gemma3-composite-mixed"}  # Conv1D; a tower whose nn.MultiheadAttention reads out_proj.weight
MIXED = {name for name in MODELS if name.endswith("-mixed")}
PADDED = {  # a batch of two documents, one of them padded
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 2, 2]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    "labels": torch.tensor([[5, 6, 7, 8], [9, 10, -100, -100]]),
}
TEXTS = [f"Document {i}. The quick brown fox jumps over the lazy dog. " * 3 for i in range(20)]
TOKENS = [torch.arange(i, i + 32) for i in range(8)]
FEW = {"num_samples": 4, "seq_len": 32}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **more):
    """The model `name` of MODELS, with `more` settings, with random weights; the same arguments give the same ones."""
    import transformers

    model_type, settings = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **settings, **more})
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def byte_tokenizer(bos: bool = False):
    """One token a byte, plus an end-of-text token and, with `bos`, one that is put before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>", "pad_token": "<eos>"}
    if bos:
        tokenizer.add_special_tokens(["<eos>", "<bos>"])
        number = tokenizer.token_to_id("<bos>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", number)])
        special["bos_token"] = "<bos>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def save(model, folder: Path) -> Path:
    """The model and a byte tokenizer as a folder for `from_pretrained`."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_model(name: str, folder: Path, **more) -> Path:
    """The same of a tiny model in bfloat16."""
    return save(tiny_model(name, torch.bfloat16, **more), folder)


def save_texts(file: Path, documents: int = 40) -> Path:
    """Short documents as .jsonl."""
    rows = [{"text": f"Document {i}: the quick brown fox jumps over {i} lazy dogs. " * 3} for i in range(documents)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def word_tokenizer(**special):
    """Words w0 ... w59 with ids 10 ... 69; 0 unknown, 1 eos, 2 pad, 3 bos."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, "<pad>": 2, "<s>": 3} | {f"w{i}": 10 + i for i in range(60)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "bos_token" in special:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", model_max_length=8, **special)


def words(first: int, count: int) -> str:
    """Text of words of `word_tokenizer`."""
    return " ".join(f"w{i}" for i in range(first, first + count))
