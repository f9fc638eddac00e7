"""Tokens of many documents: in memory or in files that a stopped run continues, with the same samples."""

import json
import pickle
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model, word_tokenizer, words

from proxsparse import prune_
from proxsparse.data import batches, calibration, sources, tokens
from proxsparse.data.calibration import calibration_batches
from proxsparse.errors import InputError


@pytest.fixture
def tokenizer():
    return word_tokenizer(eos_token="</s>", pad_token="<pad>")


@pytest.fixture
def small_blocks(monkeypatch):
    for name, value in (("BLOCK", 3), ("TEXTS_PER_CALL", 2)):
        monkeypatch.setattr(tokens, name, value)


def samples_of(given) -> list[list[int]]:
    return [ids[mask.bool()].tolist() for batch in given for ids, mask in zip(*list(batch.values())[:2], strict=True)]


@pytest.mark.parametrize("special", [{"eos_token": "</s>"}, {"eos_token": "</s>", "bos_token": "<s>"}])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("num_samples", [2, 9, 11])
def test_a_stopped_store_continues_to_the_same_samples(special, packing, num_samples, tmp_path, small_blocks):
    """At whatever document it is stopped."""
    texts = [words(4 * i, 2 + i % 5) for i in range(12)] + [" ", "w1"]
    tokenizer, counted = word_tokenizer(**special), []
    arguments = {"num_samples": num_samples, "seq_len": 4, "batch_size": 2, "packing": packing}

    class Stopping:
        pad_token_id, eos_token_id, bos_token_id = None, 1, tokenizer.bos_token_id

        def __call__(self, texts, **arguments):
            counted.extend(texts if isinstance(texts, list) else ())
            if len(counted) > stop:
                raise KeyboardInterrupt
            return tokenizer(texts, **arguments)

    stop = 1000
    expected = samples_of(calibration_batches(texts[:5], Stopping(), **arguments, rest=texts[5:]))
    assert len(expected) == num_samples
    assert [len(sample) for sample in expected if packing] == [4] * num_samples * packing
    for first_stop in range(len(texts)):
        folder, counted = tmp_path / str(first_stop), []
        for stop in (first_stop, 1000):  # the second call continues
            with suppress(KeyboardInterrupt):
                store = tokens.TokenStore(folder, "the text")
                batches = calibration_batches(texts[:5], Stopping(), **arguments, rest=iter(texts[5:]), store=store)
            for name in (tokens.IDS, tokens.ENDS):  # a kill may come after a write to the file
                if stop < 1000 and (folder / name).exists():
                    with (folder / name).open("ab") as file:
                        file.write(b"torn")
        assert samples_of(pickle.loads(pickle.dumps(batches))) == expected
        assert len(counted) < len(texts) + 5, "finished blocks are not tokenized again"


def test_many_samples_are_shuffled_too(tokenizer, monkeypatch):
    monkeypatch.setattr(calibration, "TOKENS_IN_MEMORY", 200)
    texts = [words(i, 2) for i in range(50)]
    few, every, *others = (
        samples_of(calibration_batches(texts[:20], tokenizer, count, 8, seed=seed, rest=iter(texts[20:])))
        for count, seed in ((20, 1), (50, 1), (50, 1), (50, 2))
    )
    assert few == samples_of(calibration_batches(texts[:20], tokenizer, 20, 8, seed=1))
    assert sorted(every) == [[10 + i, 11 + i] for i in range(50)]
    assert every == others[0] != others[1]
    assert sorted(every[:20]) != sorted(few)


def test_a_text_with_fewer_samples_than_asked_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "TOKENS_IN_MEMORY", 100)
    text, asked = tmp_path / "text.jsonl", {"num_samples": 50, "window": 8, "seq_len": 8, "folder": tmp_path / "tokens"}
    text.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20)))
    found = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="the text gives only 20 samples"):
            found.append(samples_of(batches.read_batches(str(text), tiny_model("llama"), byte_tokenizer(), **asked)[0]))
        monkeypatch.setattr(batches, "first_and_rest", None)
    assert found[0] == found[1]


def test_a_store_of_another_text_is_refused(tokenizer, tmp_path):
    calibration_batches(["w1 w2"], tokenizer, 1, 8, store=tokens.TokenStore(tmp_path, ["a", 1]))
    assert tokens.TokenStore(tmp_path, ["a", 1]).counts == {"blocks": 1, "documents": 1, "tokens": 2, "ended": 0}
    with pytest.raises(InputError, match="has changed since the run was stopped; delete this folder if the text is"):
        tokens.TokenStore(tmp_path, ["a", 2])


@pytest.mark.parametrize("name", [tokens.PROGRESS, tokens.IDS, tokens.ENDS])
@pytest.mark.parametrize("content", ["", "[]", '{"source": "a", "blocks": 1}', "[" * 10**5], ids=lambda text: text[:9])
def test_a_damaged_store_is_named(name, content, tokenizer, tmp_path):
    calibration_batches(["w1 w2"], tokenizer, 1, 8, store=tokens.TokenStore(tmp_path, "a"))
    (tmp_path / name).unlink()
    if name == tokens.PROGRESS or not content:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"^{tmp_path}: damaged; delete it$"):
        tokens.TokenStore(tmp_path, "a")


def test_the_identity_of_a_source_changes_with_its_files(tmp_path):
    found = [sources.identity_of("c4")]
    for content in ("one", "two2"):
        (tmp_path / "a.txt").write_text(content)
        for _ in range(2):
            found += [sources.identity_of(str(tmp_path)), sources.identity_of(str(tmp_path / "a.txt"))]
            (tmp_path / f"{content}-folder").mkdir(exist_ok=True)  # not a text
    assert len({json.dumps(each) for each in found}) == 5


def test_a_folder_without_space_is_refused(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10 << 20))
    with pytest.raises(InputError, match=r"10 MiB free, but .*--num_samples 1000000 .*about 381 MiB; free"):
        calibration_batches(["w1 w2"], tokenizer, 10**6, 100, store=tokens.TokenStore(tmp_path / "a" / "b", "x"))


@pytest.mark.parametrize("packing", [False, True])
def test_many_tokens_are_stored_beside_the_checkpoints(packing, tmp_path, monkeypatch):
    """In a folder that does not exist yet; more samples than before are another call."""
    document = "The quick brown fox jumps over the lazy dog. " * 27
    (tmp_path / "text.txt").write_text("\n\n".join(f"Document {i}. {document}" for i in range(20)))
    few = {"num_samples": 3, "seq_len": 16, "packing": packing}
    expected = prune_(tiny_model("llama"), "wanda", str(tmp_path / "text.txt"), byte_tokenizer(), **few)
    monkeypatch.setattr("proxsparse.data.batches.TOKENS_IN_MEMORY", 40)
    for _ in range(2):
        stored = {"data": str(tmp_path / "text.txt"), "checkpoints": tmp_path / "new" / "folder"}
        found = prune_(tiny_model("llama"), "wanda", tokenizer=byte_tokenizer(), **stored, **few)
        assert all(torch.equal(mask, expected[name]) for name, mask in found.items())
    with pytest.raises(InputError, match="has changed since the run"):
        prune_(tiny_model("llama"), "wanda", tokenizer=byte_tokenizer(), **stored, **few | {"num_samples": 5})


def test_an_error_of_the_source_names_what_is_stored(tokenizer, tmp_path, small_blocks):
    def texts():
        yield from (words(i, 2) for i in range(7))
        raise InputError("the network is gone")

    message = "^the network is gone; if the text has not changed, a resumed run continues after 16 tokens$"
    with pytest.raises(InputError, match=message):
        calibration_batches([words(0, 2)] * 2, tokenizer, 20, 8, rest=texts(), store=tokens.TokenStore(tmp_path, "x"))
    with pytest.raises(InputError, match=r"^the network is gone$"):
        calibration_batches([words(0, 2)] * 2, tokenizer, 20, 8, rest=texts())
