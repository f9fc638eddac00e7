"""Text of the model itself: every token is the one its definition says, and a stopped run goes on bit by bit."""

import json
import random

import pytest
import torch
from tiny_models import MODELS, byte_tokenizer, tiny_model

from proxsparse.data import self_text
from proxsparse.data.self_text import BATCH, MIN_TOKENS, sample_documents
from proxsparse.data.sources import load_texts
from proxsparse.errors import InputError

SEQ_LEN = 24
ENDS = list(range(40))  # many, so that documents of random models end


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def model():
    return with_ends(tiny_model("llama"))


@pytest.fixture
def sample(model, tokenizer, tmp_path):
    """sample(count, ...) -> documents of the Llama; its file is text.jsonl."""

    def run(count=40, seq_len=SEQ_LEN, **how):
        return sample_documents(model, tokenizer, count, seq_len, **{"file": tmp_path / "text.jsonl", **how})

    return run


def with_ends(model):
    model.generation_config.eos_token_id = ENDS
    return model


def stop_at(monkeypatch, number):
    """Ctrl-C right before the write of that number."""
    write, written = self_text.write_file, []

    def stopping(*arguments):
        written.append(1)
        if len(written) == number:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(self_text, "write_file", stopping)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_the_one_of_the_definition(name, packing, tokenizer, tmp_path):
    """Token i inverts the cumulative distribution at u_i, computed here without cache and batch."""
    model, eos = with_ends(tiny_model(name)), tokenizer.eos_token_id
    documents = sample_documents(model, tokenizer, 9, SEQ_LEN, file=tmp_path / "t", seed=3, packing=packing)
    assert len(documents) == 9
    lengths = {len(document) for document in documents}
    assert lengths == {SEQ_LEN} if packing else len(lengths) > 1
    for number, document in enumerate(documents):
        numbers = random.Random(f"3 {number}")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[eos, *document]])).logits[0].double()
        for i in range(min(len(document) + 1, SEQ_LEN)):
            row = logits[i]
            if i < MIN_TOKENS and not packing:
                row[[*ENDS, eos]] = -torch.inf
            sums, u = row.softmax(-1).cumsum(-1), numbers.random()
            if i < len(document):
                token = document[i]
                assert sums[token] - row.softmax(-1)[token] - 1e-5 <= u <= sums[token] + 1e-5
            else:
                assert u <= sums[max(ENDS)] + 1e-5 or u >= sums[eos - 1] - 1e-5


def test_the_same_seed_gives_the_same_documents_and_another_gives_others(sample, tmp_path):
    state = torch.get_rng_state()
    first, again, other = (sample(file=tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first == again
    assert not {tuple(document) for document in first} & {tuple(document) for document in other}
    assert len({tuple(document) for document in first}) == 40
    assert torch.equal(state, torch.get_rng_state()), "training draws the same numbers with and without a cache"


def test_a_document_begins_with_bos_where_the_tokenizer_says_so(model, tmp_path):
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    without = sample_documents(model, tokenizer, 3, SEQ_LEN, file=tmp_path / "a", packing=True)
    pair = [("<bos>", tokenizer.bos_token_id)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=pair)
    having = sample_documents(model, tokenizer, 3, SEQ_LEN, file=tmp_path / "b", packing=True)
    assert having == [[tokenizer.bos_token_id, *document[:-1]] for document in without]


def test_a_stopped_run_continues_after_its_last_batch(sample, tmp_path, monkeypatch):
    whole = sample(3 * BATCH + 5, file=tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            sample(3 * BATCH + 5)
    assert len((tmp_path / "text.jsonl").read_text().splitlines()) == 2 * BATCH
    batches = []
    with monkeypatch.context() as patch:
        batch = self_text.sample_batch
        patch.setattr(self_text, "sample_batch", lambda *given: batches.append(1) or batch(*given))
        assert sample(3 * BATCH + 5) == whole
        assert sample(3 * BATCH + 5) == whole
    assert len(batches) == 2, "a finished file is only read"
    assert (tmp_path / "text.jsonl").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("stale", ["seed", "seq_len", "packing", "model", "damaged", "token", "not text"])
def test_a_file_of_other_documents_is_replaced(stale, sample, model, tmp_path):
    file = tmp_path / "text.jsonl"
    expected = sample(file=tmp_path / "new")
    sample(**{"seed": {"seed": 1}, "seq_len": {"seq_len": 20}, "packing": {"packing": True}}.get(stale, {}))
    if stale == "model":
        with torch.no_grad():
            model.lm_head.weight *= 3
        assert sample() != expected
        return
    if stale == "damaged":
        file.write_text(file.read_text()[:1000] + "\n{\n")
    if stale == "token":
        file.write_text(file.read_text().replace('"tokens": [', '"tokens": [260, '))
    if stale == "not text":
        file.write_bytes(b"\xff\xfe\n")
    assert sample() == expected
    assert file.read_bytes() == (tmp_path / "new").read_bytes()


def test_the_model_has_its_own_tensors_again(tokenizer, tmp_path):
    model = tiny_model("llama", torch.bfloat16).train()
    before = [tensor.data_ptr() for tensor in model.parameters()]
    sample_documents(model, tokenizer, 2, 8, file=tmp_path / "text.jsonl")
    assert [tensor.data_ptr() for tensor in model.parameters()] == before
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert model.training


def test_the_file_is_calibration_text_for_other_runs(sample, tokenizer, tmp_path):
    documents = sample(5)
    texts = load_texts(str(tmp_path / "text.jsonl"), "train")
    assert texts == [tokenizer.decode(document, skip_special_tokens=True) for document in documents]
    assert all(json.loads(line).keys() == {"key", "text", "tokens"} for line in (tmp_path / "text.jsonl").open())


def test_what_cannot_be_sampled_is_refused(model, tokenizer, sample, tmp_path):
    other = byte_tokenizer()
    other.eos_token = other.bos_token = None
    with pytest.raises(InputError, match="no bos or eos token, with which a text starts; use a text file"):
        sample_documents(model, other, 2, 8, file=tmp_path / "text.jsonl")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"logits of the model are NaN.*layers\.1\.mlp\.up_proj; use --precision fp32"):
        sample()
    assert not (tmp_path / "text.jsonl").exists()
