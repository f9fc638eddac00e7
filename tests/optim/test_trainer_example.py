"""examples/hf_trainer.py runs offline and leaves a 2:4 model made of pretrained weights and zeros."""

import importlib.util
import pathlib

import pytest
import torch

from proxsparse.models import prunable_layers

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "hf_trainer.py"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not on the cpp backend"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument"),
]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("hf_trainer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_prunes_the_decoder_blocks_only(example, tmp_path, capsys):
    example.main(["--max_steps", "4", "--output_dir", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "2:4 blocks after training: " in printed
    assert "2:4 blocks after the snap: 100.0%" in printed

    torch.manual_seed(0)
    before = example.tiny_llama()  # the same weights the example started from
    after = example.AutoModelForCausalLM.from_pretrained(tmp_path)
    layers, pretrained = prunable_layers(after), dict(before.named_parameters())
    assert len(layers) == 2 * 7, "q, k, v, o, gate, up and down of two decoder blocks"
    for name, weight in after.named_parameters():
        kept = weight != 0 if name.removesuffix(".weight") in layers else torch.ones_like(weight, dtype=torch.bool)
        assert kept.float().mean() == (0.5 if name.removesuffix(".weight") in layers else 1)
        assert torch.equal(weight[kept], pretrained[name][kept]), f"{name} is not made of pretrained weights"


def test_optimizer_of_the_trainer_excludes_what_is_not_pruned(example, tmp_path):
    model = example.tiny_llama()
    arguments = example.TrainingArguments(output_dir=tmp_path, report_to="none", weight_decay=0.1)
    optimizer = example.ProxTrainer(model=model, args=arguments, reg_lambda=0.25).create_optimizer()
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(list(model.parameters())), "every parameter is in one group"
    pruned = {p for group in optimizer.param_groups if group["reg_lambda"] > 0 for p in group["params"]}
    assert pruned == {layer.weight for layer in prunable_layers(model).values()}
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[model.lm_head.weight] == 0.1
    assert decay[model.model.norm.weight] == 0


def test_decoder_blocks_of_any_name_are_found(example, tmp_path):
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    model = example.AutoModelForCausalLM.from_config(config)  # its blocks are transformer.h.0 and transformer.h.1
    arguments = example.TrainingArguments(output_dir=tmp_path, report_to="none")
    optimizer = example.ProxTrainer(model=model, args=arguments, reg_lambda=0.25).create_optimizer()
    pruned = {p for group in optimizer.param_groups if group["reg_lambda"] > 0 for p in group["params"]}
    assert pruned == {p for name, p in model.named_parameters() if ".h." in name and p.ndim == 2}


def test_model_needs_text(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--model", "somewhere"])
    assert "--model and --text go together" in capsys.readouterr().err
