"""LoRA of peft on packed layers: trains, saves, loads on a packed folder, and refuses what needs the dense weight."""

import pickle

import pytest
import torch
from pruned import prune_
from tiny_models import PADDED, tiny_model

import proxsparse
from proxsparse import SparseLinear

pytest.importorskip("peft")
import peft
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "down_proj", "lm_head"]  # two packed layers of each block, and a dense layer


def lora(**settings) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **settings})


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def trained(model):
    """The model after three steps, and its losses."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, losses = torch.optim.AdamW(weights, lr=0.02), []
    for _ in range(3):
        loss = model(**PADDED).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.eval(), losses


def logits(model):
    with torch.no_grad():
        return model(PADDED["input_ids"], attention_mask=PADDED["attention_mask"]).logits


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "r": 1}], ids=str)
def test_it_trains_as_on_the_dense_model_and_loads_on_the_packed_one(settings, folders, tmp_path):
    models = []
    for folder in folders:
        torch.manual_seed(0)
        models.append(trained(peft.get_peft_model(load(folder), lora(**settings)).eval()))
    (dense, its_losses), (packed, losses) = models
    assert losses[0] > losses[2]
    torch.testing.assert_close(losses, its_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(packed), logits(dense), rtol=1e-3, atol=1e-3)
    packed.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(folders[1]), tmp_path)
    torch.testing.assert_close(logits(again), logits(packed))
    inner = again.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    assert isinstance(inner, SparseLinear)
    tokens = again.generate(PADDED["input_ids"][:1], max_new_tokens=4, do_sample=False)
    assert tokens.equal(dense.generate(PADDED["input_ids"][:1], max_new_tokens=4, do_sample=False))
    with again.disable_adapter():
        torch.testing.assert_close(logits(again), logits(load(folders[1])))


def test_every_way_to_load_an_adapter(folders, tmp_path):
    peft.get_peft_model(load(folders[1]), lora()).save_pretrained(tmp_path)
    transformers_model = load(folders[1])
    transformers_model.load_adapter(tmp_path)
    for model in (peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path), load(tmp_path), transformers_model):
        adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
        assert sum(isinstance(module.base_layer, SparseLinear) for module in adapted) == 4


def test_an_adapted_dense_model_can_be_pickled(folders):
    adapted = peft.get_peft_model(load(folders[0]), lora())
    assert pickle.loads(pickle.dumps(adapted)).peft_config["default"].r == 4


@pytest.mark.parametrize("form", ["packed", "dense"])
def test_all_linear_means_packed_layers_too(form, folders):
    model = peft.get_peft_model(load(folders[form == "packed"]), lora(target_modules="all-linear"))
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert len(adapted) == 14, "the seven layers of two blocks, without lm_head"
    again = peft.LoraConfig(r=2, target_modules="all-linear")
    model.add_adapter("second", again)
    assert {name for name, module in model.named_modules() if hasattr(module, "lora_A")} == adapted


def test_only_adapters_are_trained_and_the_packed_weights_stay(folders):
    model = load(folders[1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model, _ = trained(peft.get_peft_model(model, lora()))
    assert all("lora_" in name for name, weight in model.named_parameters() if weight.requires_grad)
    after = model.unload().state_dict()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "8:10"])
def test_a_model_packed_in_memory(pattern):
    model = proxsparse.sparsify_(prune_(tiny_model("qwen2"), pattern=pattern))
    assert str(model.get_submodule("model.layers.0.mlp.up_proj").pattern) == pattern
    _, losses = trained(peft.get_peft_model(model, lora(target_modules=r".*\.(mlp|self_attn)\..*_proj")))
    assert losses[0] > losses[2]


def test_merging_is_refused(folders):
    model = peft.get_peft_model(load(folders[1]), lora())
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="cannot be merged into a packed weight"):
            merge()


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"use_dora": True}, "DoraLinearVariant"), ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'")],
)
def test_what_needs_the_dense_weight_is_refused(settings, name, folders):
    with pytest.raises(ValueError, match=f"{name} needs the dense weight"):
        peft.get_peft_model(load(folders[1]), lora(**settings))
