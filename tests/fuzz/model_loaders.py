"""Folders of models, dense and packed: valid ones, ways to damage them, and what must hold for loaded ones."""

import atexit
import json
import os
import shutil
import tempfile
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from random import Random

import torch
import transformers
from mutations import TEXTS, Files, as_json, changed, damaged, damaged_safetensors
from pruned import prune_
from tiny_models import byte_tokenizer, tiny_model
from torch import nn

import proxsparse
from proxsparse import pack
from proxsparse.inference import convert, packed_checkpoint
from proxsparse.io.model_files import check_folder, headers, is_inside, weight_files
from proxsparse.models.loading import load_model, locate, skeleton
from proxsparse.patterns import NMPattern


@cache
def scratch() -> Path:
    """A folder for valid files, removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-valid-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
        pack.main([str(scratch() / "dense"), "--output_dir", str(scratch() / "packed"), "--overwrite_output_dir"])
    return [{path.name: path.read_bytes() for path in (scratch() / "packed").iterdir()}]


def damage_model(random: Random, files: Files) -> Files:
    """The weights, a file of settings or of the tokenizer, or an index that names traps."""
    files, kind = dict(files), random.randrange(6)
    if kind <= 1:
        files["model.safetensors"] = damaged_safetensors(random, files["model.safetensors"])
    if kind in (1, 2):
        config = json.loads(files["config.json"])
        if "quantization_config" in config and random.random() < 0.6:
            config["quantization_config"] = changed(random, config["quantization_config"])
        else:
            config = changed(random, config)
        files["config.json"] = as_json(config).encode()
    if kind == 3:
        files["config.json"] = damaged(random, files["config.json"])
    if kind == 4:
        names = [random.choice((*TEXTS, "model.safetensors", "outside.safetensors", "pipe.safetensors")) for _ in "ab"]
        index = {"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}
        index = changed(random, index) if random.random() < 0.5 else index
        files["model.safetensors.index.json"] = as_json(index).encode()
    if kind == 5:
        name = random.choice([name for name in files if name.endswith(".json")])
        files[name] = as_json(changed(random, json.loads(files[name]))).encode()
    return files


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
    found, layers = headers(files), config["quantization_config"]["layers"]
    names = convert.packed_layers(found, valid_skeleton(), layers)
    with torch.no_grad():
        tensors = dict(convert.unpack_tensors(found, list(names)))
    for name, place in names.items():
        weight = tensors[f"{name}.weight"]
        assert weight.shape == valid_skeleton().get_submodule(place).weight.shape
        assert NMPattern(2, 4).is_feasible(weight)


@cache
def valid_skeleton() -> nn.Module:
    valid_packed()
    return skeleton(scratch() / "packed")


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
            proxsparse.reference.pack.check_packed(layer.values, layer.indices)


def load_dense(path: Path) -> None:
    """`--model FOLDER`"""
    model, _ = load_model(str(path))
    assert all(parameter.is_floating_point() for parameter in model.parameters())
