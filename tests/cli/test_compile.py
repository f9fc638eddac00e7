"""--compile: the same losses and masks up to rounding; the model is as before afterwards."""

from collections import Counter

import pytest
import torch
from commands import pruned, refused, rows_in
from safetensors.torch import load_file
from torch._dynamo.utils import counters

import proxsparse
from proxsparse import finetune, train
from proxsparse.models.loading import load_model

pytestmark = pytest.mark.slow
QUICK = "--num_samples 6 --seq_len 32 --precision fp32 --eval_data none"


@pytest.fixture
def inputs(tiny_llama, text_file):
    """The flags of the model and of the text."""
    return ["--model", str(tiny_llama)], ["--data", str(text_file)]


@pytest.fixture
def graphs():
    """The counter of the graphs that were compiled; code of other tests is not reused."""
    torch._dynamo.reset()
    counters.clear()
    return lambda: Counter(counters["stats"])["unique_graphs"]


@pytest.mark.parametrize(
    ("flags", "most"),  # graphs: of a block and of the loss, with and without gradient, for other shapes
    [
        ("train --distill 0.5 --match_hidden 1", 4),
        ("train --distill 0.5 --packing false --per_device_train_batch_size 2 --gradient_checkpointing", 8),
        ("train --objective paper", 2),
        ("finetune --distill 0.5 --held_out 2", 5),
    ],
)
def test_compiled_losses_match_eager(flags, most, inputs, graphs, tmp_path):
    command, *flags = [*flags.split(), *QUICK.split(), *inputs[1]]
    model, main = inputs[0], train.main
    if command == "finetune":
        model, main = [str(pruned(model[1], tmp_path / "pruned"))], finetune.main
    losses, weights = [], []
    for name in ("eager", "compiled"):
        folder = tmp_path / name
        more = ["--compile"] if name == "compiled" else []
        assert main([*model, *flags, *more, "--output_dir", str(folder)]) == 0
        rows = rows_in(folder / "metrics.jsonl")
        losses.append([row["loss"] for row in rows])
        weights.append(load_file(folder / "model.safetensors"))
        assert (graphs() > 0) == bool(more), graphs()
    assert graphs() <= most, graphs()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, weight in weights[0].items():
        assert (weight == weights[1][name]).float().mean() > 0.99


def test_killed_and_resumed(inputs, forks, tmp_path):
    """The same bits, if all samples have the same length."""
    flags = [*inputs[0], *inputs[1], *QUICK.split(), "--distill", "0.5", "--compile", "--save_steps", "2"]
    folders = [tmp_path / "killed", tmp_path / "undisturbed"]
    killed = ("proxsparse.io.checkpoints.finish", 2, "kill")  # while the second checkpoint is written
    assert forks.run([*flags, "--output_dir", folders[0]], before=killed) == [-9]
    for folder in folders:
        assert forks.run([*flags, "--resume_from_checkpoint", "last", "--output_dir", folder]) == [0]
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_the_model_is_not_compiled_afterwards(inputs, graphs):
    model, tokenizer = load_model(inputs[0][1])
    options = {"num_samples": 4, "seq_len": 32, "text_field": "text", "compile": True}
    proxsparse.prune_(model, "proxsparse", inputs[1][1], tokenizer, **options)
    before = graphs()
    model(torch.arange(7)[None], use_cache=False)
    assert before == graphs() > 0


@pytest.mark.usefixtures("graphs")
def test_without_a_compiler(inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    flags = [*inputs[0], *inputs[1], *QUICK.split(), "--compile", "--output_dir", str(tmp_path / "run")]
    with torch._inductor.config.patch({"cpp.cxx": (None, "/no/compiler")}):
        refused(capsys, train.main, flags, "--compile: ", "/no/compiler", "--compile false")
