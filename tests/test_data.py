"""Text sources and calibration batches: every format, every refusal, and the batches' exact contents."""

import gzip
import json
import logging
import random
import sys
import time
import tracemalloc
import warnings

import pytest
import torch
from tiny_models import word_tokenizer, words

from proxsparse.data import sources
from proxsparse.data.calibration import calibration_batches
from proxsparse.data.sources import load_texts
from proxsparse.errors import InputError

TEXTS = ["alpha beta", "", "gamma\u2028delta"]  # U+2028 ends a line for str.splitlines, not for a file
OBJECTS = [{"text": text, "url": "u"} for text in TEXTS]
JSON_LINES = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in OBJECTS) + "\r\n\r\n"


@pytest.fixture
def tokenizer():
    return word_tokenizer(eos_token="</s>", pad_token="<pad>")


def write(path, content: str | bytes):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", JSON_LINES, TEXTS),
        ("a.JSONL.gz", gzip.compress(JSON_LINES.encode(), mtime=0), TEXTS),
        ("a.json.gz", gzip.compress(JSON_LINES.encode(), mtime=0), TEXTS),
        ("objects.json", json.dumps(OBJECTS, indent=2), TEXTS),
        ("strings.json", "\n " + json.dumps(TEXTS, indent=2), TEXTS),
        ("lines.json", JSON_LINES, TEXTS),
        ("marked.jsonl", b"\xef\xbb\xbf" + JSON_LINES.encode(), TEXTS),
        ("a.txt", "one\r\n\r\ntwo\n", ["one\n\ntwo"]),
        ("a.md", "# one\n\ntwo", ["# one\n\ntwo"]),
        ("a.raw", " \n = Title = \n \n Some text \n", ["", " = Title = \n", "", " Some text \n"]),
    ],
)
def test_text_formats(tmp_path, name, content, expected):
    assert load_texts(write(tmp_path / name, content), "any split") == expected


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"url": ["u"] * 3, "body": TEXTS}), tmp_path / "a.parquet")
    assert load_texts(str(tmp_path / "a.parquet"), "train", text_field="body") == TEXTS
    with pytest.raises(InputError, match=r"a\.parquet, row 1: no field 'text'.*url, body"):
        load_texts(str(tmp_path / "a.parquet"), "train")


@pytest.mark.parametrize(
    "column",
    [
        lambda pyarrow, texts: pyarrow.array(texts).dictionary_encode(),
        lambda pyarrow, texts: pyarrow.array(texts),
        lambda pyarrow, texts: pyarrow.array([{"text": text, "n": 1} for text in texts]),
        lambda pyarrow, texts: pyarrow.array([[text, None] for text in texts], pyarrow.list_(pyarrow.string())),
        lambda pyarrow, texts: pyarrow.array(
            [[("text", text)] for text in texts], pyarrow.map_(pyarrow.string(), pyarrow.string())
        ),
    ],
    ids=["dictionary", "strings", "structs", "lists", "maps"],
)
@pytest.mark.parametrize(("limit", "accepted"), [(2_600_000, True), (2_400_000, False)])
def test_size_of_a_parquet_file(tmp_path, monkeypatch, column, limit, accepted):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{i:04}" + "x" * 1000 for i in range(2500)]  # three batches of 2.5 MB in all
    file, numbers = tmp_path / "a.parquet", pyarrow.array([7, None] * 1250).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": column(pyarrow, texts), "n": numbers}), file)
    monkeypatch.setattr(sources, "UNPACKED_ALWAYS", limit)
    monkeypatch.setattr(sources, "UNPACKED_RATIO", 1)
    if accepted:
        assert len(list(sources.read_parquet(file))) == 2500
    else:
        with pytest.raises(InputError, match=r"expands to over 1 times its size; .* or convert Parquet to JSON lines"):
            list(sources.read_parquet(file))


def test_a_folder_is_read_in_sorted_order(tmp_path):
    write(tmp_path / "c.bin", b"\xff")
    with pytest.raises(InputError, match="no text file in this folder"):
        load_texts(str(tmp_path), "train")
    write(tmp_path / "._a.txt", "hidden")  # of macOS
    for name in "dbfaec":
        write(tmp_path / f"{name}.txt", name)
    write(tmp_path / "b.jsonl", '{"text": "b, JSON"}')
    assert load_texts(str(tmp_path), "train") == ["a", "b, JSON", "b", "c", "d", "e", "f"]


def test_a_cloned_data_set_is_not_its_description(tmp_path):
    write(tmp_path / "README.md", "about")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a.jsonl", '{"text": "a"}')
    with pytest.raises(InputError, match=f"no text file in this folder; give {tmp_path}/data"):
        load_texts(str(tmp_path), "train")
    assert load_texts(str(tmp_path / "data"), "train") == ["a"]
    write(tmp_path / "b.txt", "b")
    assert load_texts(str(tmp_path), "train") == ["b"]
    (tmp_path / "b.txt").unlink()
    write(tmp_path / "dataset_info.json", "{}")
    with pytest.raises(InputError, match="it is a data set of save_to_disk; write it with to_parquet"):
        load_texts(str(tmp_path), "train")


def test_shards_in_a_folder_of_the_hub_cache(tmp_path):
    data, blobs = tmp_path / "snapshots" / "revision" / "en" / "train", tmp_path / "blobs"
    for folder in (data, blobs):
        folder.mkdir(parents=True)
    write(blobs / "0f", "text")
    (data / "a.txt").symlink_to("../../../../blobs/0f")
    assert load_texts(str(data), "train") == ["text"]
    write(tmp_path / "secret", "secret")
    (data / "b.txt").symlink_to("../../../../secret")
    with pytest.raises(InputError, match=r"b\.txt: not a regular file in this folder"):
        load_texts(str(data), "train")


def test_many_blank_lines_take_linear_time():
    before = time.process_time()
    assert list(sources.cut_documents(["one", *[""] * 20_000, "two"])) == ["one" + "\n\n" * 20_001 + "two"]
    assert time.process_time() - before < 1


def test_home_and_named_sources(tmp_path, monkeypatch):
    write(tmp_path / "builtin", "not a source of text")
    write(tmp_path / "a.txt", "home")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load_texts("~/a.txt", "train") == ["home"]
    assert len(load_texts("builtin", "train")) > 1
    with pytest.raises(InputError, match="unknown format"):
        load_texts("./builtin", "train")


def test_limit_counts_documents_with_text_and_stops_reading(tmp_path):
    path = write(tmp_path / "a.jsonl", '"one"\n""\n"two"\nnot JSON\n')
    assert load_texts(path, "train", limit=2) == ["one", "", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"a\.txt: no document with text"),
        ("a.raw", " \n\n", r"a\.raw: no document with text"),
        ("a.json", "[]", r"a\.json: no document with text"),
        ("a.jsonl", '"ok"\n{"text": "cut\n', r"a\.jsonl, line 2: malformed JSON .*; use one list"),
        ("a.json", '\n[{"text": "ok"},\n{"text" "no"}]', r"a\.json, line 3: malformed JSON"),
        ("a.jsonl", '{"body": "b", "url": "u"}', r"a\.jsonl, line 1: no field 'text'.*body, url"),
        ("a.json", '[{"text": "ok"}, {}]', r"a\.json, row 2: no field 'text'.*none"),
        ("a.jsonl", '{"text": null}', r"a\.jsonl, line 1, field 'text': None is not text"),
        ("a.jsonl", "\n17\n", r"a\.jsonl, line 2: 17 is not text"),
        ("a.jsonl", r'"\ud800"', r"a\.jsonl, line 1: contains an unpaired surrogate.*delete"),
        ("a.txt", b"fine\n\xe9t\xe9\n", r"a\.txt, line 2: not UTF-8.*convert"),
        ("a.txt", "text".encode("utf-16"), r"a\.txt, line 1: has NUL characters, as UTF-16 has; convert it to UTF-8"),
        ("a.txt", gzip.compress(b"x", mtime=0), r"a\.txt: is compressed with gzip; rename it to a\.txt\.gz"),
        ("a.raw.gz", gzip.compress("text".encode("utf-32-le"), mtime=0), r"a\.raw\.gz, line 1: has NUL"),
        ("a.jsonl.gz", b'{"text": "plain"}', r"a\.jsonl\.gz, after line 0: cannot be read \(Not a gzipped.*replace"),
        ("a.txt.gz", gzip.compress(b"x\n" * 9, mtime=0)[:-6], r"a\.txt\.gz, after line \d: cannot be read .*replace"),
        ("a.txt.gz", gzip.compress(b"x", mtime=0)[:10] + b"\xff" * 20, r"a\.txt\.gz, after line 0: cannot be read"),
        ("a.parquet", "not Parquet at all", r"a\.parquet: not a readable Parquet file.*replace"),
        ("a.csv", "text\nhello\n", r"a\.csv: unknown format '\.csv'; decompress it, or convert it to one of \.jsonl, "),
        ("a.jsonl.zst", "x", r"a\.jsonl\.zst: unknown format '\.zst'; decompress it"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message):
        load_texts(path, "train")


@pytest.mark.parametrize("source", ["hf://datasets/someone/set", "https://host/set"])
def test_urls_are_no_names_of_the_hub(source):
    with pytest.raises(InputError, match="a URL; give NAME or NAME:CONFIG"):
        load_texts(source, "train")


@pytest.mark.parametrize("source", ["absent.jsonl", "absent.json.gz", "./absent", "/absent/x", "~/absent", ""])
def test_absent_files_are_not_looked_up_on_the_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "read_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(InputError, match="no such file; check the path"):
        load_texts(source, "train")


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("c4", ("allenai/c4", "en", "validation", True)),
        ("wikitext2", ("Salesforce/wikitext", "wikitext-2-raw-v1", "validation", False)),
        ("someone/set", ("someone/set", None, "validation", True)),
        ("someone/set:part", ("someone/set", "part", "validation", True)),
    ],
)
def test_hub_sets_are_streamed_up_to_the_limit(monkeypatch, source, arguments):
    datasets, served = pytest.importorskip("datasets"), []

    def load_dataset(name, config, split, streaming):
        assert (name, config, split, streaming) == arguments
        return (served.append(i) or {"text": f"row {i}"} for i in range(1000))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_texts(source, "validation", limit=3) == ["row 0", "row 1", "row 2"]
    assert served == [0, 1, 2]
    with pytest.raises(InputError, match=r"split validation, row 1: no field 'body'.*text"):
        load_texts(source, "validation", text_field="body")


@pytest.mark.parametrize(
    ("source", "split", "documents", "separator"),
    [("c4", "validation", 1100, " "), ("wikitext2", "test", 2000, "\n\n"), ("a/b", "validation", 2000, "\n\n")],
)
def test_the_evaluation_text_is_the_papers(monkeypatch, source, split, documents, separator):
    rows = [f"row {i}" for i in range(2000)]
    monkeypatch.setattr(sources, "open_source", lambda *asked: ((source, x) for x in rows if asked == (source, split)))
    assert sources.evaluation_text(source) == separator.join(rows[:documents])


@pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), RuntimeError("closed")])
@pytest.mark.parametrize("when", ["opening", "reading"])
def test_hub_failure_is_one_line_with_the_remedy(monkeypatch, error, when):
    datasets = pytest.importorskip("datasets")

    def rows():
        yield {"text": "first"}
        raise error

    def load_dataset(*_, **__):
        if when == "opening":
            raise error
        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    words = r"someone/set, split train: cannot be loaded.*network.*local file.*builtin"
    with pytest.raises(InputError, match=words) as caught:
        load_texts("someone/set", "train")
    assert type(error).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


def test_builtin_is_deterministic_large_and_disjoint(monkeypatch):
    train, validation = load_texts("builtin", "train"), load_texts("builtin", "validation")
    assert train == load_texts("builtin", "train")
    assert len(train) >= 200
    assert len(validation) >= 20
    assert min(map(len, train + validation)) > 0
    paragraphs = [" ".join(part.split()) for text in train + validation for part in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    with pytest.raises(InputError, match="no split 'test'; choose train or validation"):
        load_texts("builtin", "test")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # a stripped Python
    with pytest.raises(InputError, match=r"no pydoc_data\.topics; use a local text file"):
        load_texts("builtin", "train")


def test_one_truncated_document_a_sample_in_the_order_of_the_seed(tokenizer):
    texts, order, state = [words(10 * i, 3 + i) for i in range(5)], list(range(5)), random.getstate()
    batches = calibration_batches(texts, tokenizer, num_samples=5, seq_len=5, seed=7)
    assert random.getstate() == state
    random.Random(7).shuffle(order)
    expected = [[10 + 10 * i + j for j in range(min(3 + i, 5))] for i in order]
    assert [batch["input_ids"].tolist() for batch in batches] == [[row] for row in expected]


def test_a_tokenizer_that_truncates_on_the_left_reads_the_beginning_too(tokenizer, monkeypatch):
    texts = ["one two three four five six seven eight nine ten"]
    expected = calibration_batches(texts, tokenizer, 1, 4)[0]["input_ids"]
    monkeypatch.setattr(tokenizer, "truncation_side", "left")
    assert torch.equal(calibration_batches(texts, tokenizer, 1, 4)[0]["input_ids"], expected)
    assert tokenizer.truncation_side == "left"


def test_padding_mask_and_labels_of_documents_of_two_tokens_or_more(tokenizer):
    texts = ["", " \n", "w1", words(0, 2), "\n\n", words(10, 4), words(20, 3)]
    batches = calibration_batches(texts, tokenizer, num_samples=3, seq_len=8, batch_size=2)
    assert [len(batch["input_ids"]) for batch in batches] == [2, 1]
    assert sorted(length for batch in batches for length in batch["attention_mask"].sum(1).tolist()) == [2, 3, 4]
    for batch in batches:
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        assert {value.dtype for value in batch.values()} == {torch.int64}
        mask = batch["attention_mask"]
        assert torch.equal(mask, mask.sort(dim=1, descending=True).values)
        assert mask.sum(1).max() == mask.shape[1]
        assert torch.equal(batch["input_ids"] == 2, mask == 0)
        assert torch.equal(batch["labels"], batch["input_ids"].where(mask == 1, -100))


@pytest.mark.parametrize(
    ("special", "padding_id"), [({"eos_token": "</s>", "pad_token": "<pad>"}, 2), ({"eos_token": "</s>"}, 1), ({}, 0)]
)
def test_padding_id_falls_back_to_eos_then_zero(special, padding_id):
    texts = ["w1 w2", "w3 w4 </s>"]
    (batch,) = calibration_batches(texts, word_tokenizer(**special), num_samples=2, seq_len=4, batch_size=2)
    short = batch["attention_mask"].sum(1).argmin()
    assert batch["input_ids"][short, 2] == padding_id
    assert (batch["labels"] == -100).sum() == 1  # a true eos at the end of a document stays a target


@pytest.mark.parametrize("special", [{"eos_token": "</s>"}, {}, {"eos_token": "</s>", "bos_token": "<s>"}])
@pytest.mark.parametrize("num_samples", [1, 4])
def test_packing_cuts_exact_windows(special, num_samples):
    texts = [words(0, 9), "", words(9, 7), "w59", words(16, 20)]
    order = list(range(5))
    random.Random(42).shuffle(order)
    stream = []
    for index in order:
        tokens = [10 + int(word[1:]) for word in texts[index].split()]
        tokens = [3, *tokens] if "bos_token" in special and tokens else tokens
        if len(tokens) >= 2:
            stream += [1, *tokens] if stream and special else tokens
    windows, rest = [], stream
    for _ in range(num_samples):
        window = (rest if "bos_token" not in special or rest[0] == 3 else [3, *rest])[:8]
        windows, rest = [*windows, window], rest[8 - (window[0] != rest[0]) :]
    batches = calibration_batches(texts, word_tokenizer(**special), num_samples, seq_len=8, batch_size=8, packing=True)
    assert batches[0]["input_ids"].tolist() == windows
    if "bos_token" in special:
        assert batches[0]["input_ids"][:, 0].eq(3).all(), "every sample begins with bos"
        words_of = [token for window in windows for token in window if token > 3]
        assert words_of == [token for token in stream if token > 3][: len(words_of)], "no token of the text is lost"
    assert batches[0]["attention_mask"].all()
    assert torch.equal(batches[0]["labels"], batches[0]["input_ids"])


@pytest.mark.parametrize("packing", [False, True])
def test_only_the_documents_needed_are_tokenised_without_any_warning(tokenizer, packing, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # other tests raise it
    calls = []

    class Counting:
        pad_token_id, eos_token_id = 2, 1

        def __call__(self, texts, **arguments):
            calls.extend([texts] if isinstance(texts, str) else texts)
            return tokenizer(texts, **arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration_batches([words(0, 20)] * 100, Counting(), num_samples=3, seq_len=20, packing=packing)
    assert len(calls) == 3
    assert not caplog.records
    tokenizer(words(0, 20))
    assert "longer than the specified maximum" in caplog.text  # so the log above was being listened to


@pytest.mark.parametrize(("packing", "made"), [(False, 2), (True, 3)])
def test_too_little_text_warns_with_both_numbers(tokenizer, packing, made):
    texts = [words(0, 12), words(20, 12), "w1"]
    with pytest.warns(UserWarning, match=f"num_samples=9, but the text gives only {made} samples with seq_len=8"):
        batches = calibration_batches(texts, tokenizer, num_samples=9, seq_len=8, packing=packing)
    assert len(batches) == made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples=0: must be at least 1"),
        ({"seq_len": 1}, "seq_len=1: must be at least 2"),
        ({"batch_size": -1}, "batch_size=-1: must be at least 1"),
        ({"texts": []}, "no sample in the text: a sample needs at least 2 tokens; add text"),
        ({"texts": ["w1", " "]}, "no sample in the text"),
        ({"packing": True, "seq_len": 99}, "no sample in the text: a sample needs at least 99 tokens.*lower seq_len"),
    ],
)
def test_bad_arguments(tokenizer, arguments, message):
    usable = {"texts": ["w1 w2 w3"], "num_samples": 1, "seq_len": 8}
    with pytest.raises(InputError, match=message):
        calibration_batches(tokenizer=tokenizer, **(usable | arguments))


def test_paragraphs_are_read_line_by_line(tmp_path):
    write(tmp_path / "b.txt", "\n \none\ntwo\n\n\n \t\nthree\n")
    assert load_texts(str(tmp_path / "b.txt"), "train") == ["one\ntwo\n\nthree"]
    write(tmp_path / "a.txt", "\n\n".join("word " * 200 for _ in range(4000)))  # 4 MB
    tracemalloc.start()
    assert sum(len(text) for _, text in sources.read_prose(tmp_path / "a.txt")) > 3.9e6
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6
