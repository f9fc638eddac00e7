"""Tiny random models of several families with a byte-level tokenizer, as Hugging Face folders: a run takes a second."""

import pytest
import torch

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def byte_tokenizer():
    """One token a byte, plus an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def save_tiny_model(family: str, folder, **overrides):
    """A random model of a transformers family (its config class without "Config") and its tokenizer in `folder`."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **overrides})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A folder with a tiny random Llama in bfloat16."""
    return save_tiny_model("Llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Forty short documents as .jsonl."""
    import json

    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    rows = [{"text": f"Document {i}: the quick brown fox jumps over {i} lazy dogs. " * 3} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
