"""The parts of a run, one by one: flags and their sources, schedules, scaling, monitor, mask files, perplexity."""

import itertools
import json
import math

import pytest
import tiny_models
import torch
from methods.layer_cases import hooked_inputs
from safetensors import safe_open
from safetensors.torch import save_file

from proxsparse import NMPattern, nm_mask
from proxsparse.data.calibration import endless_order, evaluation_tokens
from proxsparse.errors import InputError
from proxsparse.evaluation.perplexity import CHUNK, mean_loss, perplexity, window_bos
from proxsparse.io import model_files
from proxsparse.io.atomic import atomic_directory
from proxsparse.io.mask_files import load_masks, masks_sha256, read_rows, save_masks
from proxsparse.models.layers import prunable_layers
from proxsparse.run.args import RECIPE_NAMES
from proxsparse.run.parse import parse_finetune, parse_train, train_args
from proxsparse.training import loop, optimizer
from proxsparse.training.learnable_layer import LearnableLayer, make_learnable_layers
from proxsparse.training.mask_monitor import MaskMonitor, feasible_share
from proxsparse.training.optimizer import prox_adamw
from proxsparse.training.options import LearningOptions
from proxsparse.training.scaling import activation_scaling


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_is_valid(name):
    assert parse_train(["--recipe", name]).output.recipe == name


def test_paper_recipes_hold_the_papers_table():
    table = {"mistral-7b-v0.1": 20, "mistral-7b-v0.3": 25, "qwen2.5-14b": 0.2, "openllama-7b-v2": 1}
    table |= {"llama-2-7b": 0.25, "llama-2-13b": 0.5, "llama-3.1-8b": 0.85}
    for name, reg_lambda in table.items():
        args = parse_train(["--recipe", name])
        options = args.options
        slow = name in ("mistral-7b-v0.1", "mistral-7b-v0.3", "llama-3.1-8b")
        assert (options.reg_lambda, options.reg_lambda_rel, options.objective) == (reg_lambda, None, "paper")
        assert (options.learning_rate, options.warmup_ratio) == (5e-5 if slow else 1e-4, 0.1)
        assert options.frozen_lambda == (0.25 if name == "llama-2-13b" else 0)
        assert (args.hardware.precision, args.data.num_samples) == ("bf16", 400)


def test_flags_beat_the_file_and_the_file_beats_the_recipe(tmp_path):
    assert parse_train([]).output.recipe == "demo"
    assert parse_train(["--model", "x"]).output.recipe is None
    (tmp_path / "c.yaml").write_text("recipe: llama-2-7b\nnum_samples: 7\nlearning_rate: 3e-4\ninclude: [mlp, -x]\n")
    args = parse_train(["--config", str(tmp_path / "c.yaml"), "--learning_rate", "0.5"])
    assert (args.options.learning_rate, args.data.num_samples, args.options.reg_lambda) == (0.5, 7, 0.25)
    assert args.model.include == ["mlp", "-x"]


@pytest.mark.parametrize(
    ("recipe", "changes", "expected"),
    [
        ("llama-2-7b", {"reg_lambda_rel": 0.01}, {"reg_lambda": None, "reg_lambda_rel": 0.01}),
        ("demo", {"objective": "masked"}, {"reg_lambda_rel": 0.006}),  # the default: changes nothing
        ("smollm2-135m", {"objective": "paper"}, {"learning_rate": 1e-4, "distill": 0, "match_hidden": 0}),
        ("smollm2-135m", {"objective": "masked"}, {"match_hidden": 16}),
    ],
)
def test_a_flag_takes_back_what_the_recipe_chose_for_another_one(recipe, changes, expected):
    flags = train_args(recipe=recipe, **changes).flags()
    assert {name: flags[name] for name in expected} == expected


@pytest.mark.parametrize("parse", [parse_train, lambda flags: parse_finetune(["runs/a", *flags])])
def test_a_flag_takes_back_how_the_file_saves(parse, tmp_path):
    (tmp_path / "c.yaml").write_text("save_steps: 100\n")
    options = parse(["--config", str(tmp_path / "c.yaml"), "--save_minutes", "5"]).options
    assert (options.save_steps, options.save_minutes, options.seconds_between_checkpoints) == (None, 5, 300)


@pytest.mark.parametrize("text", ["- list", "a: [", "seq_len: true", "seq_len: 1.5", "config: x.yaml", "extra: 1"])
def test_a_malformed_file_is_refused(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=r"c\.yaml"):
        parse_train(["--config", str(tmp_path / "c.yaml")])


def test_the_learning_rate_rises_then_falls_and_no_step_is_lost():
    factors = [optimizer.lr_factor(step, 100, LearningOptions()) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[10:] == pytest.approx([1 - i / 90 for i in range(90)])
    assert min(factors) > 0


@pytest.mark.parametrize(
    ("flags", "steps"),
    [("", 40), ("--max_steps 3", 3), ("--num_train_epochs 2.5", 100)]
    + [(f"--gradient_accumulation_steps {count}", steps) for count, steps in ((8, 5), (25, 1))],
)
def test_step_count(flags, steps):
    assert loop.step_count(40, parse_train(["--model", "x", *flags.split()]).options) == steps


def test_products_of_decimal_fractions_are_not_cut():
    assert loop.step_count(100, LearningOptions(num_train_epochs=0.29)) == 29
    assert optimizer.lr_factor(27, 100, LearningOptions(warmup_ratio=0.29)) == pytest.approx(28 / 29)


def test_later_passes_are_shuffled_with_the_seed():
    first, again, other = (list(itertools.islice(endless_order(20, seed), 60)) for seed in (1, 1, 2))
    assert first == again != other
    assert first[:20] == list(range(20)) == sorted(first[20:40]) != first[20:40]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_bf16_weights_and_moments_are_rounded_stochastically(precision, dtype):
    options = LearningOptions(objective="paper", reg_lambda=1.0, seed=5).check()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(dtype)
    layers, pretrained = {"0": model[0]}, {"0.weight": model[0].weight.detach().clone()}
    patterns = dict.fromkeys(layers, NMPattern(2, 4))
    learned = make_learnable_layers(layers, pretrained, {}, patterns, masked=False)
    optimizer = prox_adamw(model, learned, options)
    model(torch.ones(1, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    assert optimizer.stochastic_rounding is (precision == "bf16")
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {dtype}
    assert [group["reg_lambda"] for group in optimizer.param_groups] == [1.0, 0.0, 0.0, 0.0]
    assert {(group["seed"], group["betas"]) for group in optimizer.param_groups} == {(5, (0.9, 0.999))}


def test_activation_scaling_is_the_equation_and_ignores_padding_and_further_samples():
    model = tiny_models.tiny_model("llama")
    layers = prunable_layers(model)
    documents = [torch.randint(3, 260, (1, length)) for length in (9, 5)]
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in documents]
    padded = {name: torch.nn.functional.pad(row, (0, 4)) for name, row in batches[0].items()}
    first = [activation_scaling(model, layers, some, samples) for some, samples in ((batches, 1), ([padded], 8))]
    assert all(torch.equal(first[0][name], first[1][name]) for name in layers)
    scaling, inputs = activation_scaling(model, layers, batches, samples=2), hooked_inputs(model, batches)
    for name, layer in layers.items():
        norms = torch.cat(inputs[name]).double().norm(dim=0)
        expected = norms / (layer.weight.double().abs() * norms).mean()
        torch.testing.assert_close(scaling[name].double(), expected, rtol=1e-5, atol=0)
        assert (layer.weight * scaling[name]).abs().mean().item() == pytest.approx(1, rel=1e-5)


def test_monitor_takes_mixed_patterns_and_stacks_of_weights():
    """A 2:4 layer of which two of three blocks are decided, and a stack of two 1:2 weights, all pretrained to zero."""
    layer = torch.nn.Parameter(torch.tensor([[4.0, 3, 0, 0, 1, 2, 0, 9, 0, 5, 6, 0]]))
    stack = torch.nn.Parameter(torch.ones(2, 1, 4))
    one = LearnableLayer(None, layer, layer.detach().clone(), None, NMPattern(2, 4))
    two = LearnableLayer(None, stack, torch.zeros(2, 1, 4), None, NMPattern(1, 2))
    monitor = MaskMonitor([one, two], steps=2)
    with torch.no_grad():
        layer[0, 3] = 5.0  # three of its block now, and another two are kept
        stack[1, 0, :2] = torch.tensor([0.0, 7.0])  # decided, for the second
    row = monitor.observe(1)
    assert feasible_share([one, two]) == (1 + 1) / (3 + 4)
    assert row["feasible_share"] == pytest.approx((1 + 1) / (3 + 4))
    assert row["mask_change"] == pytest.approx((2 + 2) / (12 + 8))
    kept = torch.tensor([4.0, 0, 2, 9, 5, 6])
    assert row["norm_gap"] == 0.0, "what is kept and was not 0 has not moved"
    with torch.no_grad():
        layer *= 1.5
    assert monitor.observe(2)["norm_gap"] == pytest.approx((kept / 2).norm().item() / kept.norm().item())
    assert [row["step"] for row in monitor.similarity()] == [0, 1, 2]
    assert [row["to_final"] for row in monitor.similarity()] == pytest.approx([1 - 4 / 20, 1, 1])
    assert MaskMonitor([two], steps=1).observe(1)["norm_gap"] == 0.0, "not 0 / 0"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_monitor_takes_layers_with_and_without_scale_and_masks(order):
    def layer(scaled: bool, masked: bool) -> LearnableLayer:
        linear, scale = torch.nn.Linear(8, 2, bias=False), torch.rand(8) + 0.1 if scaled else None
        weight = torch.nn.Parameter(torch.randn(2, 8)) if masked else linear.weight
        return LearnableLayer(linear if masked else None, weight, torch.randn(2, 8), scale, NMPattern(2, 4))

    kinds = [layer(True, True), layer(False, True), layer(True, False)]
    learned = [kinds[index] for index in order]
    assert torch.equal(MaskMonitor(learned, 1).mask, torch.cat([each.mask().flatten() for each in learned]))


def test_masks_round_trip_and_are_checked_against_their_own_patterns(tmp_path):
    file, masks = tmp_path / "masks.safetensors", {"a.b": nm_mask(torch.rand(3, 12)), "c": nm_mask(torch.rand(5, 20))}
    masks["d"] = nm_mask(torch.rand(2, 8), NMPattern(1, 4))  # 12 and 20 are not multiples of 8
    patterns = {"a.b": "2:4", "c": "2:4", "d": "1:4"}
    save_masks(file, masks, patterns, "some/model", base_revision=None)
    loaded = load_masks(file)
    for rows in (slice(1, 3), slice(2, 2)):
        read = read_rows(file, dict.fromkeys(masks, rows))
        assert all(torch.equal(read[name], mask[rows]) for name, mask in masks.items())
    assert all(torch.equal(loaded[name], mask) for name, mask in masks.items())
    assert masks_sha256(loaded) == masks_sha256(dict(reversed(masks.items())))
    with pytest.raises(InputError, match="layer d does not keep 2:4"):
        save_masks(tmp_path / "other.safetensors", masks, "2:4")
    with safe_open(file, framework="pt") as opened:
        packed, metadata = {name: opened.get_tensor(name) for name in masks}, opened.metadata()
    for changed, words in (
        ({"patterns": json.dumps(patterns | {"a.b": "1:4"})}, r"layer a\.b \[3, 12\] does not keep 1:4"),
        ({"patterns": json.dumps(patterns | {"a.b": "1:5"})}, r"layer a\.b \[3, 12\] does not keep 1:5"),
        ({"format": "pt"}, "not a mask file of proxsparse .format 'pt'.; give a masks.safetensors file"),
        ({"pattern": "9:8"}, r"masks\.safetensors.*9:8"),
    ):
        save_file(packed, file, metadata | changed)
        with pytest.raises(InputError, match=words):
            load_masks(file)


def test_a_file_is_opened_once_for_all_its_tensors_and_again_if_it_changes(tmp_path, monkeypatch):
    opened, open_file, file = [], model_files.open_file, tmp_path / "model.safetensors"
    monkeypatch.setattr(model_files, "open_file", lambda path: opened.append(path) or open_file(path))
    for count in (3, 4):
        save_file({str(number): torch.full((count,), number) for number in range(count)}, file)
        headers = model_files.headers([file])
        assert all((model_files.read_tensor(headers, name) == int(name)).all() for name in headers)
    assert len(opened) == 4  # for the headers and for the tensors, twice


def test_an_atomic_directory_replaces_everything_or_nothing(tmp_path):
    for attempt in range(2):  # folders too, also over those of an earlier save
        with atomic_directory(tmp_path) as scratch:
            (scratch / "templates").mkdir()
            (scratch / "templates" / "x").write_text(str(attempt))
    names = sorted(tmp_path.rglob("*"))

    def fail():
        with atomic_directory(tmp_path) as scratch:
            (scratch / "templates").mkdir()
            (scratch / "templates" / "x").write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert (tmp_path / "templates" / "x").read_text() == "1"
    assert sorted(tmp_path.rglob("*")) == names


def test_perplexity_is_the_papers_convention():
    model = tiny_models.tiny_model("llama", torch.float64)
    tokens = evaluation_tokens("some\n\nrows of text\n\njoined by two newlines", tiny_models.byte_tokenizer())
    assert len(tokens) == len("some\n\nrows of text\n\njoined by two newlines")
    losses = []
    for start in (0, 16):  # windows do not overlap; the rest of the text is dropped
        logits = model(input_ids=tokens[None, start : start + 16]).logits[0].log_softmax(-1)
        losses += [-logits[i, tokens[start + i + 1]].item() for i in range(15)]
    score = perplexity(model, None, tokens, seq_len=16)
    assert score.value == pytest.approx(math.exp(sum(losses) / 30), rel=1e-6)
    assert (score.windows, score.tokens) == (2, 32)
    assert perplexity(model, None, tokens, 16, max_windows=1).windows == 1


@pytest.mark.parametrize(
    ("name", "adds_bos", "asked", "where"),
    [
        ("llama", True, None, "first"),
        ("llama", True, "each", "each"),
        ("gemma3-mixed", True, None, "each"),
        ("gemma3-composite-mixed", True, None, "each"),
        ("gemma2-mixed", True, "first", "first"),
        ("gemma2-mixed", False, None, "none"),
        ("llama", False, "first", "none"),
    ],
)
def test_bos_stands_before_each_window_for_gemma_and_at_the_start_for_others(name, adds_bos, asked, where):
    model, tokenizer = tiny_models.tiny_model(name, torch.float64), tiny_models.byte_tokenizer(adds_bos)
    text = "some words that are cut into windows, one after the other"
    tokens = evaluation_tokens(text, tokenizer)
    rows = list(tokens.split(16))[: len(tokens) // 16]
    if where == "each":  # bos, and the next 15 tokens of the text
        rows = [torch.cat([tokens[:1], row]) for row in tokens[1:].split(15) if len(row) == 15]
    losses = [torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:]).item() for row in rows]
    score = perplexity(model, tokenizer, tokens, 16, bos=asked)
    assert score.value == pytest.approx(math.exp(sum(losses) / len(rows)), rel=1e-6)
    assert (score.windows, score.tokens, score.bos) == (len(rows), 16 * len(rows), where)


def test_the_loss_in_parts_is_that_of_all_logits_in_float32():
    for tokens in (1, CHUNK, 2 * CHUNK + 3):
        logits, targets = 5 * torch.randn(tokens, 11).bfloat16(), torch.randint(11, (tokens,))
        expected = torch.nn.functional.cross_entropy(logits.float(), targets)
        torch.testing.assert_close(mean_loss(logits, targets), expected)


def test_bos_before_each_window_needs_a_bos_token():
    with pytest.raises(InputError, match="--eval_bos each: the tokenizer has no bos token"):
        window_bos(tiny_models.tiny_model("llama"), tiny_models.byte_tokenizer(), "each", "eval_bos")


def test_perplexity_of_what_is_not_finite_is_nan_and_a_window_that_does_not_fit_is_refused():
    model, tokens = tiny_models.tiny_model("llama"), torch.zeros(50, dtype=torch.int64)
    model.model.norm.weight.data[0] = math.nan
    assert math.isnan(perplexity(model, None, tokens, seq_len=16).value)
    for seq_len in (0, 1, 100):
        with pytest.raises(InputError, match=str(seq_len)):
            perplexity(model, None, tokens, seq_len)
