"""The parts of a run, one by one: flags and their sources, schedules, metric, monitor, masks on disk, perplexity."""

import itertools
import math

import pytest
import tiny_models
import torch

from proxsparse import NMPattern, env, nm_mask
from proxsparse.data.calibration import sample_stream
from proxsparse.errors import InputError
from proxsparse.evaluation.perplexity import evaluation_tokens, perplexity
from proxsparse.io.atomic import atomic_directory
from proxsparse.io.mask_files import load_masks, masks_sha256, save_masks
from proxsparse.models.layers import prunable_layers
from proxsparse.run.config import TrainConfig
from proxsparse.run.parse import make_config, parse_config
from proxsparse.run.recipes import RECIPE_NAMES
from proxsparse.training import loop, optimizer
from proxsparse.training.learnable_layer import LearnableLayer, make_learnable_layers
from proxsparse.training.mask_monitor import MaskMonitor, agreement, feasible_share
from proxsparse.training.optimizer import prox_adamw
from proxsparse.training.options import LearningOptions
from proxsparse.training.scaling import activation_scaling

# ---------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_is_valid(name):
    assert parse_config(["--recipe", name]).recipe == name


def test_paper_recipes_hold_the_papers_table():
    table = {"mistral-7b-v0.1": 20, "mistral-7b-v0.3": 25, "qwen2.5-14b": 0.2, "openllama-7b-v2": 1}
    table |= {"llama-2-7b": 0.25, "llama-2-13b": 0.5, "llama-3.1-8b": 0.85}
    for name, reg_lambda in table.items():
        config = parse_config(["--recipe", name])
        slow = name in ("mistral-7b-v0.1", "mistral-7b-v0.3", "llama-3.1-8b")
        assert (config.reg_lambda, config.reg_lambda_rel, config.objective) == (reg_lambda, None, "paper")
        assert (config.learning_rate, config.warmup_ratio) == (5e-5 if slow else 1e-4, 0.1)
        assert config.frozen_lambda == (0.25 if name == "llama-2-13b" else 0)
        assert (config.precision, config.num_samples, config.update) == ("bf16", 400, "all")


def test_no_arguments_mean_the_demo():
    assert parse_config([]).recipe == "demo"
    assert parse_config(["--model", "x"]).recipe is None


def test_flags_beat_the_file_and_the_file_beats_the_recipe(tmp_path):
    (tmp_path / "c.yaml").write_text("recipe: llama-2-7b\nnum_samples: 7\nlearning_rate: 3e-4\ninclude: [mlp]\n")
    config = parse_config(["--config", str(tmp_path / "c.yaml"), "--learning_rate", "0.5"])
    assert (config.learning_rate, config.num_samples, config.reg_lambda) == (0.5, 7, 0.25)
    assert config.include == ["mlp"]


def test_a_stronger_lambda_takes_back_the_weaker_one():
    config = parse_config(["--recipe", "llama-2-7b", "--reg_lambda_rel", "0.01"])
    assert (config.reg_lambda, config.reg_lambda_rel) == (None, 0.01)


def test_the_default_said_aloud_takes_nothing_back():
    assert parse_config(["--recipe", "demo", "--objective", "masked"]).reg_lambda_rel == 0.006


def test_another_objective_takes_back_the_recipes_step():
    config = parse_config(["--recipe", "smollm2-135m", "--objective", "paper"])
    assert (config.learning_rate, config.reg_lambda_rel, config.update) == (1e-4, 3e-3, "all")
    assert (config.forward, config.start, config.average_runs) == ("dense", "pretrained", 1)


def test_dense_learning_takes_back_what_the_recipe_chose_for_masked_learning():
    masked, dense = (make_config(recipe="smollm2-135m", forward=forward) for forward in ("masked", "dense"))
    assert (masked.start, masked.average_runs) == ("swap", 3)
    assert (dense.start, dense.average_runs) == ("pretrained", 1)


@pytest.mark.parametrize(
    "text", ["- a list", "a: [", "seq_len: true", "seq_len: 1.5", "include: mlp", "config: x.yaml"]
)
def test_a_malformed_file_is_refused(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=r"c\.yaml"):
        parse_config(["--config", str(tmp_path / "c.yaml")])


# ---------------------------------------------------------------------------------------------- schedules


def test_the_learning_rate_rises_then_falls_and_no_step_is_lost():
    config = TrainConfig().check()
    factors = [optimizer.lr_factor(step, 100, config) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[10:] == pytest.approx([1 - i / 90 for i in range(90)])
    assert min(factors) > 0


STEPS = {
    (): 40,
    ("--max_steps", "3"): 3,
    ("--num_train_epochs", "2.5"): 100,
    ("--gradient_accumulation_steps", "8"): 5,
    ("--gradient_accumulation_steps", "25"): 1,
}


@pytest.mark.parametrize(("flags", "steps"), STEPS.items())
def test_step_count(flags, steps):
    assert loop.step_count(40, parse_config(["--model", "x", *flags])) == steps


def test_later_passes_are_shuffled_with_the_seed():
    batches = [{"id": i} for i in range(20)]
    first, again, other = (
        [batch["id"] for batch in itertools.islice(sample_stream(batches, seed), 60)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first[:20] == list(range(20))
    assert sorted(first[20:40]) == list(range(20)) != first[20:40]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_bf16_weights_and_moments_are_rounded_stochastically(precision, dtype):
    options = LearningOptions(objective="paper", reg_lambda=1.0, seed=5).check()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(dtype)
    layers, pretrained = {"0": model[0]}, {"0.weight": model[0].weight.detach().clone()}
    learned = make_learnable_layers(
        layers, pretrained, {}, dict.fromkeys(layers, NMPattern(2, 4)), masked=False, first_masks={}
    )
    optimizer = prox_adamw(model, learned, options)
    model(torch.ones(1, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    assert optimizer.stochastic_rounding is (precision == "bf16")
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {dtype}
    assert [group["reg_lambda"] for group in optimizer.param_groups] == [1.0, 0.0, 0.0, 0.0]
    assert {(group["seed"], group["betas"]) for group in optimizer.param_groups} == {(5, (0.9, 0.999))}


# ---------------------------------------------------------------------------------------------- metric and monitor


@pytest.fixture
def model_and_layers():
    model = tiny_models.tiny_model("llama")
    return model, prunable_layers(model)


def batches_of(*lengths, padding=0):
    """Random documents, one a batch, with `padding` zeros on the right."""
    for length in lengths:
        ids = torch.randint(3, 260, (1, length))
        mask = torch.ones_like(ids)
        yield {
            "input_ids": torch.nn.functional.pad(ids, (0, padding)),
            "attention_mask": torch.nn.functional.pad(mask, (0, padding)),
        }


def test_activation_metric_is_the_equation(model_and_layers):
    model, layers = model_and_layers
    batches = list(batches_of(9, 5))
    inputs = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda _, args, __, name=name: inputs[name].append(args[0].flatten(0, -2).double()))
    metric = activation_scaling(model, layers, batches, samples=2)
    for name, layer in layers.items():
        norms = torch.cat(inputs[name]).norm(dim=0)
        expected = norms / (layer.weight.double().abs() * norms).mean()
        torch.testing.assert_close(metric[name].double(), expected, rtol=1e-5, atol=0)
        assert (layer.weight * metric[name]).abs().mean().item() == pytest.approx(1, rel=1e-5)


def test_activation_metric_ignores_padding_and_further_samples(model_and_layers):
    model, layers = model_and_layers
    torch.manual_seed(1)
    plain = activation_scaling(model, layers, list(batches_of(9, 5)), samples=1)
    torch.manual_seed(1)
    padded = activation_scaling(model, layers, list(batches_of(9, padding=4)), samples=8)
    for name in layers:
        assert torch.equal(plain[name], padded[name])


def test_monitor_counts_what_it_says(model_and_layers):
    _, layers = model_and_layers
    pretrained = {f"{name}.weight": layer.weight.detach().clone() for name, layer in layers.items()}
    learned = make_learnable_layers(
        layers, pretrained, {}, dict.fromkeys(layers, NMPattern(2, 4)), masked=False, first_masks={}
    )
    monitor = MaskMonitor(learned.values(), steps=2)
    row = monitor.observe(1)
    assert row == {"feasible_share": 0.0, "mask_change": 0.0, "norm_gap": 0.0}
    with torch.no_grad():
        for layer in layers.values():  # the smaller two of every four, halved: all blocks 2:4, every mask bit turned
            weight = layer.weight
            weight.copy_(torch.where(nm_mask(weight.abs()), 0.0, weight / 2))
    row = monitor.observe(2)
    assert (row["feasible_share"], row["mask_change"]) == (1.0, 1.0)
    assert row["norm_gap"] == pytest.approx(0.5)
    assert monitor.similarity() == [{"step": s, "to_final": t} for s, t in ((0, 0.0), (1, 0.0), (2, 1.0))]
    assert feasible_share(learned.values()) == 1.0


def test_monitor_takes_mixed_patterns_and_stacks_of_weights():
    """A 2:4 layer of which two of three blocks are decided, and a stack of two 1:2 weights, all pretrained to zero."""
    layer = torch.nn.Parameter(torch.tensor([[4.0, 3, 0, 0, 1, 2, 0, 9, 0, 5, 6, 0]]))
    stack = torch.nn.Parameter(torch.ones(2, 1, 4))
    one = LearnableLayer(None, layer, layer.detach().clone(), None, NMPattern(2, 4))
    two = LearnableLayer(None, stack, torch.zeros(2, 1, 4), None, NMPattern(1, 2))
    monitor = MaskMonitor([one, two], steps=1)
    with torch.no_grad():
        layer[0, 3] = 5.0  # three of its block now, and another two are kept
        stack[1, 0, :2] = torch.tensor([0.0, 7.0])  # decided, for the second
    row = monitor.observe(1)
    assert row["feasible_share"] == pytest.approx((1 + 1) / (3 + 4))
    assert row["mask_change"] == pytest.approx((2 + 2) / (12 + 8))
    kept = torch.tensor([4.0, 0, 2, 9, 5, 6])
    assert row["norm_gap"] == 0.0, "what is kept and was not 0 has not moved"
    with torch.no_grad():
        layer *= 1.5
    assert monitor.observe(2)["norm_gap"] == pytest.approx((kept / 2).norm().item() / kept.norm().item())
    assert MaskMonitor([two], steps=1).observe(1)["norm_gap"] == 0.0, "not 0 / 0"


# ---------------------------------------------------------------------------------------------- masks on disk


@pytest.fixture
def masks():
    return {"a.b": nm_mask(torch.rand(3, 12)), "c": nm_mask(torch.rand(5, 20))}  # 12 and 20 are no multiples of 8


def test_masks_round_trip(masks, tmp_path):
    save_masks(tmp_path / "masks.safetensors", masks, "2:4", "some/model")
    loaded = load_masks(tmp_path / "masks.safetensors")
    assert all(torch.equal(loaded[name], mask) for name, mask in masks.items())
    assert agreement(masks, loaded) == 1.0
    assert masks_sha256(loaded) == masks_sha256(dict(reversed(masks.items())))


def test_a_mask_that_is_not_nm_is_refused(masks, tmp_path):
    masks["c"][0, 0] ^= True
    save_masks(tmp_path / "masks.safetensors", masks, "2:4", "some/model")
    with pytest.raises(InputError, match="layer c does not keep 2:4"):
        load_masks(tmp_path / "masks.safetensors")


@pytest.mark.parametrize("content", [None, b"", b"no mask at all", b"\xff" * 64])
def test_a_file_without_masks_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "masks.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"masks\.safetensors"):
        load_masks(tmp_path / "masks.safetensors")


def test_staged_moves_everything(tmp_path):
    for attempt in range(2):  # folders too, also over those of an earlier save
        with atomic_directory(tmp_path) as scratch:
            (scratch / "templates").mkdir()
            (scratch / "templates" / "x").write_text(str(attempt))
            (scratch / "model.safetensors").write_text(str(attempt))
    assert (tmp_path / "templates" / "x").read_text() == "1"


def test_staged_leaves_nothing_of_a_save_that_fails(tmp_path):
    def fail():
        with atomic_directory(tmp_path) as scratch:
            (scratch / "model.safetensors").write_text("half")
            raise OSError("full")

    (tmp_path / "model.safetensors").write_text("1")
    with pytest.raises(OSError, match="full"):
        fail()
    assert (tmp_path / "model.safetensors").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


# ---------------------------------------------------------------------------------------------- perplexity


def test_perplexity_is_the_papers_convention():
    model = tiny_models.tiny_model("llama", torch.float64)
    tokens = evaluation_tokens("some\n\nrows of text\n\njoined by two newlines", tiny_models.byte_tokenizer())
    assert len(tokens) == len("some\n\nrows of text\n\njoined by two newlines")
    losses = []
    for start in (0, 16):  # windows do not overlap; the rest of the text is dropped
        logits = model(input_ids=tokens[None, start : start + 16]).logits[0].log_softmax(-1)
        losses += [-logits[i, tokens[start + i + 1]].item() for i in range(15)]
    score = perplexity(model, tokens, seq_len=16)
    assert score.value == pytest.approx(math.exp(sum(losses) / 30), rel=1e-6)
    assert (score.windows, score.tokens) == (2, 32)
    assert perplexity(model, tokens, 16, max_windows=1).windows == 1


def test_perplexity_of_what_is_not_finite_is_nan():
    model = tiny_models.tiny_model("llama")
    model.model.norm.weight.data[0] = math.nan
    assert math.isnan(perplexity(model, torch.zeros(50, dtype=torch.int64), seq_len=16).value)


@pytest.mark.parametrize("seq_len", [0, 1, 100])
def test_perplexity_refuses_a_window_that_does_not_fit(seq_len):
    with pytest.raises(InputError, match=str(seq_len)):
        perplexity(tiny_models.tiny_model("llama"), torch.zeros(50, dtype=torch.int64), seq_len)


# ---------------------------------------------------------------------------------------------- env


def test_env_prints_who_serves_and_why_not(capsys, monkeypatch):
    env.main([])
    assert "it serves CUDA GPUs" in capsys.readouterr().out or torch.cuda.is_available()
    monkeypatch.setenv("PROXSPARSE_BACKEND", "reference")
    env.main([])
    printed = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split() for line in printed.splitlines() if line}
    assert rows["prox_nm_"][-1] == "serves"
    assert rows["512 rows"][-1] == "serves"
    assert "cusparselt for 1 row, 16 rows, 512 rows: it serves CUDA GPUs" in printed or torch.cuda.is_available()
