"""Models, masks and texts that are damaged, or fit no other: what the calls of test_refusals.py are given."""

import json
import os
import shutil

import torch
from commands import call, config_of, pruned
from pruned import pruned_model
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, save_texts, save_tiny_model

from proxsparse import pack
from proxsparse.io.mask_files import load_masks, save_masks

UP, NORM = "model.layers.1.mlp.up_proj", "model.layers.1.input_layernorm"


def change_weights(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def set_last(name, value):
    return lambda folder: change_weights(folder, lambda weights: weights[f"{name}.weight"].view(-1)[-1:].fill_(value))


def set_base(folder, name):
    file = folder / "masks.safetensors"
    save_masks(file, load_masks(file), base_model=name, base_weights_sha256="0" * 64)


def set_masks(masks):
    return lambda folder: save_masks(folder / "masks.safetensors", masks)


def repeated(block, rows, columns):
    """A mask [rows, columns] of blocks such as "1100"."""
    return torch.tensor([digit == "1" for digit in block]).repeat(rows, columns // len(block))


def shorten(folder, name="model.safetensors"):
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])


def cut_a_row(weights):
    weights[f"{UP}.weight"] = weights[f"{UP}.weight"][1:]


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


def index(content):
    """The weights in shards, which the index names."""
    return lambda folder: (folder / "model.safetensors").rename(folder / INDEX).write_text(content)


def set_dtype(folder):
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"dtype": "torch.bfloat16"}))


def halve(folder):
    """Converts the weights to float16, where one is so large that no code stands for it."""
    weights = {name: weight.half() for name, weight in load_file(folder / "model.safetensors").items()}
    up = weights[f"{UP}.weight"]
    weights[f"{UP}.weight"] = torch.where(up == up.max(), 6e4, up)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


INDEX = "model.safetensors.index.json"
DENSE = {  # damaged copies of the dense model
    "no-tokenizer": lambda folder: [file.unlink() for file in folder.glob("*token*")],
    "cut": shorten,
    "incomplete": lambda folder: change_weights(folder, lambda weights: weights.pop(f"{UP}.weight")),
    "nan-layer": set_last(UP, torch.nan),
    "infinite-last-norm": set_last("model.norm", torch.inf),
}
PRUNED = {  # damaged copies of the pruned model
    "cut-pruned": shorten,
    "nan-pruned": set_last("model.norm", torch.nan),
    "no-weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no-shard": index('{"metadata": {}, "weight_map": {"a": "b.safetensors"}}'),
    "no-metadata": index('{"weight_map": {"a": "b.safetensors"}}'),
    "bad-index": index('{"weights": 1}'),
    "empty-weights": lambda folder: save_file({}, folder / "model.safetensors"),
    "list-config": write("generation_config.json", "[1]"),
    "torch-dtype": set_dtype,
    "large-half": halve,
    "bad-config": write("config.json", "{"),
    "empty-config": write("config.json", "{}"),
    "other-shape": lambda folder: change_weights(folder, cut_a_row),
    "not-2of4": lambda folder: change_weights(folder, lambda weights: weights[f"{UP}.weight"][0, :4].fill_(1.0)),
    "cut-masks": lambda folder: shorten(folder, "masks.safetensors"),
    "other-masks": set_masks({UP: repeated("1100", 64, 32)}),
    "short-masks": set_masks({UP: repeated("1100", 32, 32)}),
    "base-gone": lambda folder: set_base(folder, "absent"),
    "base-changed": lambda folder: set_base(folder, str(folder.parent / "dense")),
}
SETTINGS = {"c": "lerning_rate: 1", "masked": "objective: masked", "rate": "learning_rate: 0.1", "obs": "method: obs"}
SETTINGS |= {"no": "eval_data: no", "noes": "exclude: [no]", "list": "allocation: [x]", "mapping": "include: {a: b}"}
SETTINGS |= {"numbers": "seq_len: [16, 32]", "empty": "", "false": "false"}


def make_places(folder):
    """Fills the folder in which the refused calls run."""
    dense = save_tiny_model("llama", folder / "dense")
    save_texts(folder / "text.jsonl")
    save_tiny_model("llama", folder / "other-vocabulary", vocab_size=300)
    pruned(dense, folder / "pruned")
    (pruned(dense, folder / "3of4", "--pattern", "3:4") / "masks.safetensors").unlink()
    call(pack.main, folder / "pruned", "--output_dir", folder / "packed")
    for source, damages in ((dense, DENSE), (folder / "pruned", PRUNED)):
        for name, damage in damages.items():
            damage(shutil.copytree(source, folder / name))
    swap_two_tokens(shutil.copytree(dense, folder / "other-tokens"))
    pruned_model().model.save_pretrained(folder / "base-model")
    four = repeated("1100", 8, 8)
    save_masks(folder / "no-layer.safetensors", {"model.layers.9.mlp": four})
    save_masks(folder / "no-shape.safetensors", {"model.layers.0.mlp.up_proj": four})
    texts = {f"{name}.yaml": line for name, line in SETTINGS.items()}
    texts |= {"other.jsonl": '{"body": "words"}\n', "short.txt": "a few words", "used/thesis.tex": "precious"}
    for name in ("directory", "pipe", "used"):
        (folder / name).mkdir()
    for name, content in texts.items():
        (folder / name).write_text(content)
    os.mkfifo(folder / "pipe" / "a.jsonl")
    return folder


def swap_two_tokens(folder):
    tokenizer = byte_tokenizer()
    tokens = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokens["model"]["vocab"]
    tokens["model"]["vocab"] = vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}
    tokenizer._tokenizer = tokenizer.backend_tokenizer.from_str(json.dumps(tokens))
    tokenizer.save_pretrained(folder)
