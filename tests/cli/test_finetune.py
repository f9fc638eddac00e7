"""`proxsparse finetune`: the mask is held, what is trained changes and nothing else, and nothing is lost."""

import shutil

import pytest
import torch
from commands import QUICK, call, result_of, rows_in, run
from pruned import save_pruned_model
from safetensors.torch import load_file
from saved_models import rewrite
from tiny_models import save_tiny_model, tiny_model

from proxsparse import NMPattern, pack, prune
from proxsparse.errors import InputError
from proxsparse.finetune import main
from proxsparse.io.mask_files import load_masks
from proxsparse.methods.finetune import default_learning_rate, split
from proxsparse.models.loading import load_model
from proxsparse.training.best_weights import BestWeights
from proxsparse.training.options import FinetuneOptions

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pruned(tiny_llama, text_file, tmp_path_factory):
    """A folder that prune --method sparsegpt has made."""
    folder = tmp_path_factory.mktemp("pruned") / "run"
    data = ["--model", tiny_llama, "--data", text_file, "--eval_data", "none", *QUICK]
    call(prune.main, "--method", "sparsegpt", *data, "--output_dir", folder)
    return folder


@pytest.fixture
def tune(pruned, text_file, tmp_path):
    """tune("name", *flags) -> result.json of a run into that folder of tmp_path."""

    def call_main(name, *flags, model=pruned):
        given = ["--data", text_file, "--eval_data", text_file, "--output_dir", tmp_path / name, *QUICK]
        call(main, model, *given, "--held_out", "2", *flags)
        return result_of(tmp_path / name)

    return call_main


def changed(before, after) -> set[str]:
    """The names of the tensors that differ in two folders."""
    before, after = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def assert_held(before, after):
    """Every layer is 2:4 with the zeros of before, and they are +0.0."""
    masks, weights = load_masks(after / "masks.safetensors"), load_file(after / "model.safetensors")
    pruned = load_file(before / "model.safetensors")
    for name, mask in masks.items():
        weight = weights[f"{name}.weight"]
        assert NMPattern(2, 4).is_feasible(weight)
        assert not weight[~mask].any()
        assert not weight[~mask].signbit().any()
        assert not pruned[f"{name}.weight"][~mask].any(), "a pruned weight has come back"


def test_whole_job(tune, pruned, tmp_path, plots):
    result = tune("run", "--learning_rate", "0.01")  # bf16 norms are 1: smaller changes would be rounded
    assert_held(pruned, tmp_path / "run")
    names = changed(pruned, tmp_path / "run")
    assert UP in names
    assert {"model.norm.weight", "model.layers.1.input_layernorm.weight"} <= names
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert (result["status"], result["method"], result["updated"]) == ("complete", "finetune", True)
    assert result["base_model"] != result["model"] == pruned.name
    assert {"dense", "pruned", "finetune"} <= result["perplexity"].keys()
    rows = rows_in(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == result["steps"] == 6  # 8 samples, 2 held out
    assert [row["step"] for row in rows if "held_out_loss" in row] == list(range(1, 7))
    assert [step for step, _ in result["held_out"]["losses"]] == list(range(7))
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"]
    report, card = ((tmp_path / "run" / name).read_text() for name in ("report.md", "README.md"))
    assert "held_out_loss.png" in report
    assert "pruned to 2:4 and fine-tuned" in card
    call(pack.main, tmp_path / "run", "--output_dir", tmp_path / "packed")


@pytest.mark.parametrize(
    "flags",
    [
        "--precision bf16 --master_weights --distill 0",
        "--distill 1 --gradient_accumulation_steps 2 --gradient_checkpointing",
        "--weight_decay 0.1 --per_device_train_batch_size 2 --packing",
    ],
)
def test_norms_and_layers_are_trained_and_nothing_else(flags, tune, pruned, tmp_path):
    tune("run", "--learning_rate", "0.01", "--held_out", "0", *flags.split())  # the last weights, even if worse
    assert_held(pruned, tmp_path / "run")
    names = changed(pruned, tmp_path / "run")
    assert {kind for kind in ("norm", "proj", "embed", "lm_head") for name in names if kind in name} == {"norm", "proj"}


def test_embeddings_keep_all_bits(tune, pruned, tmp_path):
    """Those of a file in fp32, also if the run computes in bf16."""
    model, tokenizer = load_model(str(pruned), torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 1 + 2**-12
    model.save_pretrained(tmp_path / "fp32")
    tokenizer.save_pretrained(tmp_path / "fp32")
    tune("run", "--precision", "bf16", "--learning_rate", "0.01", "--distill", "0", model=tmp_path / "fp32")
    names = changed(tmp_path / "fp32", tmp_path / "run")
    assert UP in names
    assert not any("embed" in name or "lm_head" in name for name in names)


def test_a_folder_of_another_tool_and_its_patterns(tune, text_file, tiny_llama, tmp_path):
    foreign = save_pruned_model(tmp_path / "foreign", pattern="1:4")
    assert set(tune("norms", "--teacher", tiny_llama, model=foreign)["patterns"].values()) == {"1:4"}
    assert_held(foreign, tmp_path / "norms")
    flags = ["--method", "wanda", "--allocation", "sensitivity"]
    pruned = run(prune.main, tiny_llama, text_file, tmp_path / "mixed", *flags)
    assert tune("tuned", model=tmp_path / "mixed")["patterns"] == pruned["patterns"]


@pytest.mark.parametrize(
    ("pattern", "flags", "rate"),
    [
        ("1:4", "", 3e-4),
        ("2:4", "", 3e-4),
        ("4:6", "", 1.5e-4),
        ("6:8", "", 1.5e-4),
        ("6:8", "--learning_rate 2e-4", 2e-4),
    ],
)
def test_learning_rate_of_milder_patterns(pattern, flags, rate, tune, tmp_path):
    foreign = save_pruned_model(tmp_path / "foreign", pattern=pattern)
    result = tune("run", "--distill", "0", *flags.split(), model=foreign)
    rates = [row["learning_rate"] for row in rows_in(tmp_path / "run" / "metrics.jsonl")]
    assert result["learning_rate"] == max(rates) == rate


def test_learning_rate_of_mixed_patterns():
    assert default_learning_rate([NMPattern(6, 8), NMPattern(2, 4)]) == 3e-4
    assert default_learning_rate([NMPattern(8, 10), NMPattern(4, 6)]) == 1.5e-4


def test_the_recorded_mask_is_held(tune, pruned, tmp_path):
    """Also where kept weights are 0, as after `pack --bits 4`, so that the zeros do not define the mask."""
    zeros = lambda tensors: tensors | {UP: tensors[UP] * (torch.rand(tensors[UP].shape) < 0.5)}  # noqa: E731
    rewrite(shutil.copytree(pruned, tmp_path / "zeros"), zeros)
    result = tune("run", "--learning_rate", "0.01", "--held_out", "0", model=tmp_path / "zeros")
    assert result["masks_sha256"] == result_of(pruned)["masks_sha256"]
    assert_held(pruned, tmp_path / "run")
    assert UP in changed(tmp_path / "zeros", tmp_path / "run")


def test_a_teacher_that_is_given_may_be_another_model(tune, tmp_path):
    wide = save_tiny_model("llama", tmp_path / "wide", hidden_size=64)
    result = tune("run", "--teacher", wide)
    assert (result["config"]["teacher"], result["teacher"]) == ("wide", "wide") != (result["base_model"],) * 2


def test_the_best_weights_are_kept(tune, pruned, monkeypatch, tmp_path):
    weight, losses = torch.zeros(3), iter([3.0, 1.0, 2.0, 1.5, 0.5])
    best = BestWeights(lambda: next(losses), {"w": weight}, count=50, last=100)
    for step in range(1, 9):
        weight.fill_(step)
        assert best.observe(step).keys() == ({"held_out_loss"} if step % 2 == 0 else set())
    best.take_best_()
    assert weight.tolist() == [4, 4, 4]
    assert best.smallest() == (4, 1.0)
    worse = iter(range(100))
    monkeypatch.setattr("proxsparse.methods.finetune.held_out_loss", lambda *_: float(next(worse)))
    result = tune("run", "--evals", "6")
    assert (result["status"], result["steps"], result["held_out"]["best_step"]) == ("complete", 6, 0)
    assert not changed(tmp_path / "run", pruned)


@pytest.mark.parametrize(
    ("count", "steps"), [(2, [0, 6, 11]), (10, [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), (20, range(12))]
)
def test_the_held_out_loss_is_measured_at_the_start_and_so_many_times(count, steps):
    best = BestWeights(lambda: 0.0, {}, count, last=11)
    assert [step for step in range(12) if best.measures(step)] == [*steps]


@pytest.mark.parametrize(
    ("held_out", "groups"),
    [(0, "0123 4567"), (1, "0123 456 7"), (4, "0123 4567"), (5, "012 3 4567"), (7, "0 123 4567")],
)
def test_samples_are_held_out_not_batches(held_out, groups):
    ids = torch.arange(8)[:, None].expand(8, 3)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(4)]
    training, measured = split(batches, FinetuneOptions(held_out=held_out))
    found = [*(training[index] for index in range(len(training))), *measured]
    assert ["".join(map(str, batch["input_ids"][:, 0].tolist())) for batch in found] == groups.split()
    assert sum(len(batch["labels"]) for batch in measured) == held_out


def test_prune_and_finetune_in_one_command_equal_the_two_commands(text_file, tmp_path):
    """In fp32: a bf16 folder between the two commands would round the weights of ADMM."""
    model = save_tiny_model("llama", tmp_path / "model")
    tiny_model("llama").save_pretrained(model)
    data = ["--data", text_file, "--eval_data", text_file, "--precision", "fp32", *QUICK]
    options = ["--learning_rate", "0.01", "--distill", "0.3", "--num_train_epochs", "2"]
    start = [*data, "--model", model, "--method", "admm", "--damping", "0.05"]
    one, two, tuned = (tmp_path / name for name in ("one", "two", "tuned"))
    call(prune.main, *start, "--finetune", *options, "--output_dir", one)
    call(prune.main, *start, "--output_dir", two)
    call(main, two, *data, *options, "--packing", "false", "--output_dir", tuned)
    assert not changed(one, tuned)
    first, second = (result_of(folder) for folder in (one, tuned))
    assert first["masks_sha256"] == second["masks_sha256"]
    assert list(first["perplexity"].values())[-3:] == list(second["perplexity"].values())[-3:]
    assert list(first["perplexity"])[-3:] == ["dense", "admm", "finetune"]
    assert (first["steps"], first["updated"]) == (second["steps"], True)
    card = (one / "README.md").read_text()
    assert "with admm and fine-tuned" in card
    assert "Then the model was trained while the mask was held." in card
    call(main, one, *data, "--output_dir", tmp_path / "again")  # finds its teacher


def test_prune_and_finetune_from_a_file(tiny_llama, text_file, tmp_path):
    """Its flags of the training are read too; those of the command line replace the ones that exclude them."""
    (tmp_path / "c.yaml").write_text("method: wanda\nfinetune: 'true'\nsave_steps: 3\nmax_steps: 2\neval_data: none\n")
    flags = ["--config", tmp_path / "c.yaml", "--model", tiny_llama, "--data", text_file, *QUICK]
    more = ["--save_minutes", "5", "--output_dir", tmp_path / "run"]
    call(prune.main, *flags, *more)
    result = result_of(tmp_path / "run")
    assert (result["steps"], result["config"]["finetune"], result["config"]["save_steps"]) == (2, True, None)
    with pytest.raises(InputError, match="save_steps 3 and --save_minutes 5 exclude each other"):
        prune.main(list(map(str, [*flags, *more, "--save_steps", "3", "--output_dir", tmp_path / "other"])))
