"""A model whose k_proj and v_proj have two rows: of four processes two hold none."""

import json

import pytest
from tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "few-rows"
    return save_tiny_model("llama", folder, num_key_value_heads=1, head_dim=2)


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """Forty short documents of different lengths as .jsonl."""
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} lazy dogs. " * (2 + i % 4)}) + "\n" for i in range(40)))
    return path


@pytest.fixture(scope="session")
def flags(few_rows, documents):
    """Of runs of sixteen samples."""
    data = ["--model", few_rows, "--data", documents, "--eval_data", documents, "--precision", "fp32"]
    return [*data, "--num_samples", "16", "--seq_len", "40", "--eval_seq_len", "32", "--eval_max_windows", "3"]
