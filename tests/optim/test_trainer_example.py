"""examples/hf_trainer.py runs offline and leaves a 2:4 model made of pretrained weights and zeros, and its masks."""

import importlib.util
import pathlib
import re

import pytest
import torch

from proxsparse.io.mask_files import load_masks
from proxsparse.models.layers import prunable_layers

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
    assert re.search(r"2:4 blocks before the snap: \d+\.\d%; 14 layers pruned", printed)
    masks = load_masks(tmp_path / "masks.safetensors")

    torch.manual_seed(0)
    before = example.tiny_llama()  # the same weights the example started from
    after = example.AutoModelForCausalLM.from_pretrained(tmp_path)
    layers, pretrained = prunable_layers(after), dict(before.named_parameters())
    assert len(layers) == 2 * 7, "q, k, v, o, gate, up and down of two decoder blocks"
    for name, weight in after.named_parameters():
        mask = masks.pop(name.removesuffix(".weight"), torch.ones_like(weight, dtype=torch.bool))
        assert torch.equal(weight, torch.where(mask, pretrained[name], 0)), f"{name} is not W0 under its mask"
    assert not masks


def test_model_needs_text(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--model", "somewhere"])
    assert "--model and --text go together" in capsys.readouterr().err
