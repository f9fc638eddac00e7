"""examples/hf_trainer.py runs offline and leaves a 2:4 model made of pretrained weights and zeros."""

import importlib.util
import pathlib

import pytest
import torch

pytest.importorskip("transformers")
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
    pruned = example.prunable_weights(after)
    assert len(pruned) == 2 * 7, "q, k, v, o, gate, up and down of two decoder blocks"
    for name, weight in example.prunable_weights(before).items():
        kept = pruned[name] != 0
        assert kept.float().mean() == 0.5
        assert torch.equal(pruned[name][kept], weight[kept])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert after.get_parameter(name).all(), f"{name} was pruned"
        assert not torch.equal(after.get_parameter(name), before.get_parameter(name)), f"{name} was not trained"


def test_optimizer_of_the_trainer_excludes_what_is_not_pruned(example, tmp_path):
    model = example.tiny_llama()
    arguments = example.TrainingArguments(output_dir=tmp_path, report_to="none", weight_decay=0.1)
    optimizer = example.ProxTrainer(model=model, args=arguments, reg_lambda=0.25).create_optimizer()
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(list(model.parameters())), "every parameter is in one group"
    pruned = {p for group in optimizer.param_groups if group["reg_lambda"] > 0 for p in group["params"]}
    assert pruned == set(example.prunable_weights(model).values())
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[model.lm_head.weight] == 0.1
    assert decay[model.model.norm.weight] == 0


def test_model_needs_text(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--model", "somewhere"])
    assert "--model and --text go together" in capsys.readouterr().err
