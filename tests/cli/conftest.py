"""A tiny model and a text file: with them a whole run takes a second."""

import pytest
import torch
from commands import pruned
from pruned import packed_copy
from tiny_models import byte_tokenizer, save_texts, save_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A folder with a tiny random Llama in bfloat16."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Forty short documents as .jsonl."""
    return save_texts(tmp_path_factory.mktemp("data") / "text.jsonl")


@pytest.fixture(scope="session")
def pruned_dir(tmp_path_factory, tiny_llama):
    """What prune writes."""
    return pruned(tiny_llama, tmp_path_factory.mktemp("runs") / "llama")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The dense and the packed folder of a tiny llama in fp32, with a chat template."""
    folders, tokenizer = packed_copy(tmp_path_factory.mktemp("served"), dtype=torch.float32), byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(folders[1])
    return folders
