"""What the README tells a newcomer to type works, and its two ways to write the training loop agree bit for bit."""

import re
from pathlib import Path

import pytest
import torch

from proxsparse import NMPattern

README = (Path(__file__).parent.parent / "README.md").read_text()
WRAPPED, FUSED, PLAIN, TRAINER = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[:4]
ONE_LINE = "optimizer = proxsparse.ProxOptimizer(optimizer, reg_lambda=0.25)  # the one line\n"


def tiny_model_and_batches():
    """A random Llama with weights large enough for lambda = 0.25 to prune, and three batches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=1.0))
    tokens = torch.randint(0, 50, (3, 1, 12))
    return model, [{"input_ids": ids, "labels": ids} for ids in tokens]


def run(code: str) -> list[torch.Tensor]:
    """Executes a piece of the README and returns the weights it leaves."""
    model, batches = tiny_model_and_batches()
    names = {"model": model, "batches": batches}
    exec(code, names)
    return names["weights"]


def test_the_wrapper_prunes():
    assert all(NMPattern(2, 4).is_feasible(weight) for weight in run(WRAPPED))


def test_both_loops_agree():
    setup, loop_and_end = WRAPPED.split(ONE_LINE)
    loop, _ = loop_and_end.split("with torch.no_grad()")
    for wrapped, plain in zip(run(setup + ONE_LINE + loop), run(setup + PLAIN), strict=True):
        assert torch.equal(wrapped, plain)


def test_the_fused_step_agrees_within_rounding():
    setup, loop_and_end = WRAPPED.split(ONE_LINE)
    loop, _ = loop_and_end.split("with torch.no_grad()")
    for fused, wrapped in zip(run(setup + FUSED + loop), run(setup + ONE_LINE + loop), strict=True):
        torch.testing.assert_close(fused, wrapped, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_the_trainer_leaves_a_pruned_model_and_its_masks(tmp_path):
    pytest.importorskip("accelerate")
    model, batches = tiny_model_and_batches()
    from transformers import TrainingArguments

    args = TrainingArguments(tmp_path, max_steps=2, use_cpu=True, report_to="none")
    data = [{name: row[0] for name, row in batch.items()} for batch in batches]
    exec(TRAINER, {"model": model, "args": args, "data": data})
    assert {"model.safetensors", "masks.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    linears = [m.weight for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert all(NMPattern(2, 4).is_feasible(weight) for weight in linears)


@pytest.mark.parametrize("path", re.findall(r"\]\((\S+?\.(?:py|md|png))\)", README))
def test_links_lead_somewhere(path):
    assert (Path(__file__).parent.parent / path).exists()
