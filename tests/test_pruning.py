"""The Python front door: prune_, finetune_, perplexity, save_masks, load_masks, apply_masks_."""

import itertools
import json
import os
import signal
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType

import pytest
import torch
from commands import run
from pruned import prune_ as prune_by_magnitude
from tiny_models import FEW, TEXTS, TOKENS, byte_tokenizer, tiny_model
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.data import DataLoader, TensorDataset

import proxsparse
from proxsparse import prune
from proxsparse.errors import InputError
from proxsparse.inference.convert import unsparsify_
from proxsparse.io.mask_files import read_masks
from proxsparse.models.loading import load_model
from proxsparse.models.snap import copy_weights
from proxsparse.patterns import NMPattern
from proxsparse.runtime.signals import SIGNALS
from proxsparse.training import loop
from proxsparse.training.mask_monitor import MaskMonitor

FORMS = {
    "source": "builtin",
    "texts": TEXTS,
    "tensors": TOKENS,
    "dicts": [{"input_ids": ids[None], "attention_mask": torch.ones(1, 32, dtype=torch.int64)} for ids in TOKENS],
    "lists": [{"input_ids": ids.tolist()} for ids in TOKENS],
    "rows": [{"text": text, "url": ""} for text in TEXTS],
    "tokenizer output": byte_tokenizer()(TEXTS, padding=True, return_tensors="pt"),
    "arrays": [ids.numpy() for ids in TOKENS],
    "blank rows": [{"input_ids": []}, {"input_ids": [5]}, *({"input_ids": ids.tolist()} for ids in TOKENS)],
    "float mask": [{"input_ids": ids, "attention_mask": torch.ones(32)} for ids in TOKENS],
    "loader": DataLoader(TensorDataset(torch.stack(TOKENS)), batch_size=2),
    "loader of dicts": DataLoader([{"input_ids": ids} for ids in TOKENS], batch_size=2),
}


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def assert_pruned(model, masks, before=None):
    for name, mask in masks.items():
        weight = model.get_submodule(name).weight
        assert torch.equal(weight != 0, mask)
        assert (mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all()
        assert before is None or torch.equal(weight, torch.where(mask, before[f"{name}.weight"], 0.0))


def test_completion_offers_the_functions_that_are_imported_lazily():
    assert set(proxsparse.__all__) <= set(dir(proxsparse))


# ---------------------------------------------------------------------------------------------- prune_


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_data_in_all_forms(data, model, tokenizer):
    assert_pruned(model, proxsparse.prune_(model, "wanda", data, tokenizer, **FEW))
    assert proxsparse.perplexity(model, tokenizer, data, seq_len=16, max_windows=2) > 1


@pytest.mark.parametrize("labels", [[0.5] * 32, [1], [999] * 32], ids=["scores", "class", "other tokens"])
def test_perplexity_does_not_use_labels(labels, model, tokenizer):
    data = [{"input_ids": ids, "labels": labels} for ids in TOKENS]
    expected, measured = (proxsparse.perplexity(model, tokenizer, each, seq_len=16) for each in (TOKENS, data))
    assert measured == expected


def test_equal_tokens_in_different_forms_give_equal_masks(tokenizer):
    masks = [
        proxsparse.prune_(tiny_model("llama"), "wanda", FORMS[form], tokenizer, **FEW)
        for form in FORMS.keys() - {"source", "texts", "rows", "tokenizer output"}
    ]
    assert all(torch.equal(mask, others[name]) for others in masks for name, mask in masks[0].items())


@pytest.mark.parametrize("method", ["wanda", "admm", "proxsparse"])
def test_padding_on_either_side_and_rows_of_padding_change_nothing(method, tokenizer):
    """seq_len keeps the first tokens of a sample, wherever its padding is."""
    rows = [ids[:length] for ids, length in zip(TOKENS, (32, 20, 9, 1), strict=False)]
    results = []
    for left in (False, True):
        ids, mask = torch.zeros(5, 32).long(), torch.zeros(5, 32).long()  # the last row is padding
        for number, row in enumerate(rows):
            place = slice(32 - len(row), None) if left else slice(len(row))
            ids[number, place], mask[number, place] = row, 1
        batch = {"input_ids": ids, "attention_mask": mask}
        results.append(proxsparse.prune_(tiny_model("llama"), method, [batch], seq_len=16))
    assert all(torch.equal(mask, results[1][name]) for name, mask in results[0].items())


@pytest.mark.parametrize("item", [TOKENS[0], TEXTS[0]], ids=["tokens", "text"])
def test_an_endless_iterator_is_read_only_as_far_as_needed(item, model, tokenizer):
    assert_pruned(model, proxsparse.prune_(model, "wanda", itertools.repeat(item), tokenizer, **FEW))


def test_the_command_and_the_function_give_the_same_masks(tiny_llama, text_file, tmp_path):
    flags = ["--method", "sparsegpt", "--damping", 0.1, "--num_samples", 4, "--seed", 7, "--precision", "fp32"]
    run(prune.main, tiny_llama, text_file, tmp_path, *flags)
    model, tokenizer = load_model(str(tiny_llama), torch.float32)
    masks = proxsparse.prune_(model, "sparsegpt", str(text_file), tokenizer, damping=0.1, seed=7, **FEW)
    expected = proxsparse.load_masks(tmp_path / "masks.safetensors")
    assert all(torch.equal(masks[name], mask) for name, mask in expected.items())


def test_a_model_of_several_patterns_is_tuned_and_keeps_them(model, tokenizer):
    options = {"allocation": "sensitivity", "target_flops": 0.7}
    masks = proxsparse.prune_(model, "wanda", TEXTS, tokenizer, **options, **FEW)
    tuned = proxsparse.finetune_(model, None, TEXTS, tokenizer, **FEW)
    assert masks.keys() == tuned.keys()
    assert all(torch.equal(mask, tuned[name]) for name, mask in masks.items())
    with pytest.raises(ValueError, match="'sensitivity' chooses the pattern of every layer; leave out pattern 6:8"):
        proxsparse.prune_(tiny_model("llama"), "wanda", TEXTS, tokenizer, pattern="6:8", **options, **FEW)


@pytest.mark.parametrize(
    ("method", "owner"),
    [
        ("sparsegpt", "proxsparse.methods.sparsegpt.inverse_factor"),
        ("proxsparse", "proxsparse.training.loop.backward"),
        ("maskllm", "proxsparse.methods.maskllm.language_loss"),
    ],
)
def test_an_error_leaves_the_model_as_before(method, owner, model, tokenizer, monkeypatch):
    before, calls = copy_weights(model), iter(range(100))

    def fail_late():
        raise OSError("gone")

    module, _, name = owner.rpartition(".")
    original = getattr(__import__(module, fromlist=[name]), name)
    monkeypatch.setattr(owner, lambda *a, **k: fail_late() if next(calls) == 2 else original(*a, **k))
    with pytest.raises(OSError, match="gone"):
        proxsparse.prune_(model, method, TEXTS, tokenizer, **FEW)
    after = copy_weights(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("method", ["proxsparse", "finetune"])
def test_ctrl_c_during_a_training_leaves_a_valid_model(method, model, tokenizer, monkeypatch):
    before, steps, step = copy_weights(model), [], loop.train_step

    def interrupted(*given):
        steps.append(os.kill(os.getpid(), signal.SIGINT))
        return step(*given)

    monkeypatch.setattr(f"proxsparse.methods.{method}.train_step", interrupted)
    call = partial(proxsparse.prune_, model)
    if method == "finetune":
        call = partial(proxsparse.finetune_, prune_by_magnitude(model))
    with pytest.raises(KeyboardInterrupt):
        call(method if method == "proxsparse" else None, TEXTS, tokenizer, num_samples=8, seq_len=32)
    assert len(steps) == 1
    masks = {name: weight != 0 for name, weight in model.named_parameters() if "proj" in name}
    assert_pruned(model, {name.removesuffix(".weight"): mask for name, mask in masks.items()})
    assert method == "finetune" or all(
        torch.equal(weight, torch.where(weight != 0, before[name], 0.0)) for name, weight in model.named_parameters()
    )


def test_checkpoints_of_another_teacher_are_refused(tokenizer, tmp_path):
    teacher = tiny_model("llama")
    for refused in (False, True):
        given = prune_by_magnitude(tiny_model("llama")), teacher, TEXTS, tokenizer
        with pytest.raises(InputError, match="has a teacher with the digest") if refused else nullcontext():
            proxsparse.finetune_(*given, checkpoints=tmp_path, save_steps=1, **FEW)
        teacher.lm_head.weight.data.mul_(2)


def test_ctrl_c_after_the_last_step_is_not_lost(model, tokenizer, monkeypatch):
    similarity = MaskMonitor.similarity

    def interrupted(monitor):
        os.kill(os.getpid(), signal.SIGINT)
        return similarity(monitor)

    monkeypatch.setattr(MaskMonitor, "similarity", interrupted)
    with pytest.raises(KeyboardInterrupt):
        proxsparse.prune_(model, "proxsparse", TEXTS, tokenizer, **FEW)
    assert all(NMPattern(2, 4).is_feasible(weight) for name, weight in model.named_parameters() if "proj" in name)


def test_ctrl_c_works_after_an_error(model, tokenizer, monkeypatch):
    monkeypatch.setattr("proxsparse.training.state.count_not_finite", lambda layers: 1)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(InputError, match="became NaN"):
        proxsparse.prune_(model, "proxsparse", TEXTS, tokenizer, **FEW)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


@pytest.mark.parametrize("saves", [{"save_steps": 1}, {"save_minutes": 1e-9}])
def test_checkpoints_resume_the_same_call(saves, model, tokenizer, tmp_path, monkeypatch):
    options = {"checkpoints": tmp_path, **saves, **FEW, "include": ("proj",), "exclude": ("lm_head",)}
    expected = proxsparse.prune_(tiny_model("llama"), "proxsparse", TEXTS, tokenizer, **FEW)
    calls, step = iter(range(100)), loop.train_step

    def fail_late(*given):
        if next(calls) == 2:
            raise OSError("gone")
        return step(*given)

    with monkeypatch.context() as patch:
        patch.setattr("proxsparse.methods.proxsparse.train_step", fail_late)
        with pytest.raises(OSError, match="gone"):
            proxsparse.prune_(model, "proxsparse", TEXTS, tokenizer, **options)
    masks = proxsparse.prune_(model, "proxsparse", TEXTS, tokenizer, **options)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert all(torch.equal(masks[name], mask) for name, mask in expected.items())
    with pytest.raises(InputError, match=r"its run has learning_rate .* \(now 0.1\); give the same, or delete"):
        proxsparse.prune_(tiny_model("llama"), "proxsparse", TEXTS, tokenizer, learning_rate=0.1, **options)


@pytest.mark.parametrize("changed", [{"allocation": "sensitivity"}, {"exclude": ["down"]}, {"include": ["proj"]}])
def test_checkpoints_of_other_layers_or_patterns_are_refused(changed, tokenizer, tmp_path):
    options = {"checkpoints": tmp_path, **FEW}
    for first, second in ((changed, {}), ({}, changed)):
        folder = options["checkpoints"] = tmp_path / str(len(first))
        proxsparse.prune_(tiny_model("llama"), "wanda", TEXTS, tokenizer, **options, **first)
        with pytest.raises(InputError, match=f"its run has .* delete {folder}"):
            proxsparse.prune_(tiny_model("llama"), "wanda", TEXTS, tokenizer, **options, **second)


def test_the_modes_gradients_and_random_state_of_the_caller_change_nothing(tokenizer):
    """GPT-2 has dropout."""
    results = []
    for changed in (False, True):
        model = tiny_model("gpt2").train(changed)
        torch.manual_seed(changed)
        for weight in model.parameters() if changed else ():
            weight.grad = torch.ones_like(weight)
        options = {"distill": 0.5, "gradient_checkpointing": True}
        results.append(proxsparse.prune_(model, "proxsparse", TEXTS, tokenizer, **options, **FEW))
        state = torch.get_rng_state()
        proxsparse.finetune_(model, None, TEXTS, tokenizer, **FEW)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.initial_seed() == changed
        assert all(module.training == changed for module in model.modules())
        assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
        assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert all(torch.equal(mask, results[1][name]) for name, mask in results[0].items())


def refuse_to_compile(*_graph):
    raise AssertionError("compiled code was called")


def test_a_compiled_model_is_handled_as_the_model_without_the_wrapper(tokenizer):
    """The code that an earlier call compiled gave other masks, and names with `_orig_mod` do not fit the model."""
    compiled = partial(torch.compile, backend=refuse_to_compile)
    plain, model = tiny_model("llama"), compiled(tiny_model("llama"))
    options = {"include": [r"^model\.layers\.0\.\w+\.\w+$"]}
    expected, masks = (proxsparse.prune_(m, "wanda", TEXTS, tokenizer, **options, **FEW) for m in (plain, model))
    assert masks.keys() == expected.keys()
    assert all(torch.equal(mask, expected[name]) for name, mask in masks.items())
    proxsparse.apply_masks_(model, masks)
    measured = [proxsparse.perplexity(m, tokenizer, TEXTS, seq_len=16, max_windows=2) for m in (plain, model)]
    assert measured[0] == measured[1]
    teacher = compiled(tiny_model("llama"))
    assert proxsparse.finetune_(model, teacher, TEXTS, tokenizer, max_steps=1, **FEW).keys() == masks.keys()
    with pytest.raises(BackendCompilerFailed, match="compiled code was called"):  # afterwards it is compiled again
        model(TOKENS[0][None])
    assert proxsparse.sparsify_(model, **options) is model
    assert model.config.quantization_config["layers"] == list(masks)
    assert unsparsify_(model) is model
    assert not any(isinstance(module, proxsparse.SparseLinear) for module in model.modules())
    plain.model.norm = torch.compile(plain.model.norm)
    with pytest.raises(ValueError, match="has modules that are compiled; call this function first"):
        proxsparse.prune_(plain, "magnitude")


# ---------------------------------------------------------------------------------------------- the other functions


def test_fine_tuning_finds_the_masks_from_the_zeros(tokenizer):
    dense, model = tiny_model("llama"), tiny_model("llama")
    masks = proxsparse.prune_(model, "magnitude", include=["mlp"])
    before = copy_weights(model)
    found = proxsparse.finetune_(model, dense, TEXTS, tokenizer, num_samples=8, seq_len=32, learning_rate=1e-2)
    assert found.keys() == masks.keys()
    assert_pruned(model, masks)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert {f"{name}.weight" for name in masks} <= changed
    assert not any("self_attn" in name or "embed" in name for name in changed)


def test_fine_tuning_leaves_the_bias_of_the_output_layer(tokenizer):
    model = tiny_model("llama")
    model.lm_head = torch.nn.Linear(32, 260)
    proxsparse.prune_(model, "magnitude")
    before = model.lm_head.bias.clone()
    proxsparse.finetune_(model, None, TEXTS, tokenizer, **FEW)
    assert torch.equal(model.lm_head.bias, before)


@pytest.mark.parametrize("pattern", ["1:4", "2:8", "4:8", "8:16", "4:6"])
def test_fine_tuning_finds_any_pattern(pattern, tokenizer):
    model = tiny_model("llama", hidden_size=96, intermediate_size=192)
    masks = proxsparse.prune_(model, "magnitude", pattern=pattern)
    found = proxsparse.finetune_(model, None, TEXTS, tokenizer, **FEW)
    for name, mask in masks.items():
        assert torch.equal(found[name], mask)
        assert not model.get_submodule(name).weight[~mask].any()


def test_fine_tuning_refuses_a_damaged_layer(tokenizer):
    model = tiny_model("llama")
    proxsparse.prune_(model, "magnitude")
    model.model.layers[0].mlp.up_proj.weight.data[0, :4] = 1.0
    with pytest.raises(ValueError, match=r"^model.layers.0.mlp.up_proj: not quite 2:4: 1 of .*; prune it to 2:4"):
        proxsparse.finetune_(model, None, TEXTS, tokenizer, **FEW)


@pytest.mark.parametrize("method", ["proxsparse", "maskllm", "admm", "swap"])
def test_a_model_in_float64(method, tokenizer):
    model = tiny_model("llama").double()
    masks = proxsparse.prune_(model, method, TEXTS, tokenizer, **FEW)
    proxsparse.finetune_(model, None, TEXTS, tokenizer, **FEW)
    assert_pruned(model, masks)
    assert model.dtype == torch.float64


def test_of_a_generator_without_end_the_first_documents_are_measured(model, tokenizer, monkeypatch):
    monkeypatch.setattr("proxsparse.data.batches.FIRST_DOCUMENTS", 20)
    endless = itertools.cycle(TEXTS)
    assert proxsparse.perplexity(model, tokenizer, endless, seq_len=16, max_windows=2) > 1


def test_masks_to_a_file_and_back(model, tokenizer, tmp_path):
    before = copy_weights(model)
    masks = proxsparse.prune_(model, "wanda", TEXTS, tokenizer, **FEW)
    proxsparse.save_masks(tmp_path / "masks.safetensors", MappingProxyType(masks))
    again = tiny_model("llama")
    proxsparse.apply_masks_(again, MappingProxyType(proxsparse.load_masks(str(tmp_path / "masks.safetensors"))))
    assert_pruned(again, masks, before)
    proxsparse.sparsify_(again, bits=8).save_pretrained(tmp_path / "packed")
    assert (tmp_path / "packed" / "model.safetensors").exists()


def test_the_patterns_of_masks_are_found(tmp_path):
    features = {"1:2": 30, "2:4": 30, "5:7": 896, "12:14": 896, "16:32": 896, "2:30": 30, "62:64": 896, "1:64": 64}
    masks = {pattern: proxsparse.nm_mask(torch.rand(64, count), pattern) for pattern, count in features.items()}
    proxsparse.save_masks(tmp_path / "masks.safetensors", masks)
    assert all(str(found) == pattern for pattern, found in read_masks(tmp_path / "masks.safetensors")[1].items())


def test_a_class_without_a_file_is_pruned(model):
    """As of a notebook: its code cannot be read, that of its base class can."""
    scope = {"base": type(model), "__name__": "builtins"}
    exec("class Own(base): pass", scope)
    model.__class__ = scope["Own"]
    assert_pruned(model, proxsparse.prune_(model, "magnitude"))
