"""Folders of models that tests save, change and load."""

import json

import torch
import transformers
from commands import config_of
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, save

from proxsparse.models.loading import auto_class


def save_new(folder, model_type, **settings):
    """A tiny model of any type, with every tower that its config has, in bfloat16."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **settings})
    model = auto_class(config).from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return save(model, folder)


def rewrite(folder, change, **entries):
    """Changes the tensors and the config.json of a saved model."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


def loaded(folder):
    """The model that transformers alone loads, with nothing missing, unexpected or mismatched, except mtp."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model, info = auto_class(config).from_pretrained(folder, output_loading_info=True)
    assert not any(key for keys in info.values() for key in keys if "mtp" not in str(key)), info
    return model
