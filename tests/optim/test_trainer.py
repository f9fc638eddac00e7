"""The mixin and the callbacks in one process: groups, figures, snap, resuming, refusals, and the example."""

import copy
import importlib.util
import json
import pathlib
import re
from types import SimpleNamespace

import pytest
import torch
from pruned import pruned_model
from tiny_models import tiny_model

from proxsparse import NMPattern, ProxOptimizer, nm_mask
from proxsparse.io.mask_files import load_masks
from proxsparse.models.layers import prunable_layers
from proxsparse.models.snap import copy_weights

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
trainer_module = pytest.importorskip("proxsparse.integrations.transformers_trainer")
ProxCallback = trainer_module.ProxCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not on the cpp backend"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument"),
]


OF_TRAINER = ("save_strategy", "save_steps", "gradient_accumulation_steps")


class MaskTrainer(trainer_module.ProxTrainerMixin, transformers.Trainer):
    pass


def make(folder, model=None, callback=None, kind=MaskTrainer, **settings):
    ids = torch.randint(260, (16, 12), generator=torch.Generator().manual_seed(1))
    arguments = {"max_steps": 4, "logging_steps": 2, "learning_rate": 1e-3, "save_strategy": "no"}
    ours = {name: settings.pop(name) for name in list(settings) if name not in OF_TRAINER}
    return kind(
        model=tiny_model("llama") if model is None else model,
        args=transformers.TrainingArguments(
            folder, **arguments | settings, weight_decay=0.1, use_cpu=True, report_to="none", disable_tqdm=True
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[callback or ProxCallback()],
        **ours or {"reg_lambda": 0.25},
    )


def groups_by_parameter(trainer) -> dict:
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, ProxOptimizer)
    return {parameter: group for group in optimizer.param_groups for parameter in group["params"]}


# ------------------------------------------------------------------------------------------- the optimizer


def test_groups_that_are_not_pruned_stay_as_trainer_made_them(tmp_path):
    trainer = make(tmp_path, exclude=["down_proj"], pattern="1:4", reg_lambda=0.25, frozen_lambda=0.5)
    model, group_of = trainer.model, groups_by_parameter(trainer)
    assert group_of.keys() == set(model.parameters())
    pruned = {p for p, group in group_of.items() if group["reg_lambda"] == 0.25}
    assert pruned == {layer.weight for layer in prunable_layers(model, exclude=["down_proj"]).values()}
    assert all(group_of[p]["reg_lambda"] == 0 for p in group_of.keys() - pruned)
    assert all((group_of[p]["pattern"], group_of[p]["frozen_lambda"]) == ("1:4", 0.5) for p in pruned)
    assert group_of[model.lm_head.weight]["weight_decay"] == 0.1
    assert group_of[model.model.norm.weight]["weight_decay"] == 0


def test_decoder_blocks_of_any_name_are_found(tmp_path):
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config)  # its blocks are transformer.h.0 and transformer.h.1
    group_of = groups_by_parameter(make(tmp_path, model))
    pruned = {p for p, group in group_of.items() if group["reg_lambda"] > 0}
    assert pruned == {p for name, p in model.named_parameters() if ".h." in name and p.ndim == 2}


def test_a_relative_lambda_is_in_units_of_each_layers_mean(tmp_path):
    model = tiny_model("llama")
    layers = list(prunable_layers(model).values())
    with torch.no_grad():
        layers[0].weight *= 8
        layers[1].weight.zero_()
    group_of = groups_by_parameter(make(tmp_path, model, reg_lambda_rel=0.2))
    for layer in layers[:1] + layers[2:]:
        mean = layer.weight.abs().mean().item()
        assert group_of[layer.weight]["reg_lambda"] == pytest.approx(0.2 / mean, rel=1e-5)
    assert group_of[layers[1].weight]["reg_lambda"] == 0


# ------------------------------------------------------------------------------------------- the callback


def test_the_run_ends_with_w0_under_the_saved_masks(tmp_path):
    model, callback = tiny_model("llama"), ProxCallback()
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, :4] = -0.0
    before = copy_weights(model)
    trainer = make(tmp_path, model, callback, reg_lambda_rel=0.5)
    trainer.train()

    masks = load_masks(tmp_path / "masks.safetensors")
    assert masks.keys() == callback.masks.keys() == prunable_layers(model).keys()
    assert_snapped(model, before, masks)
    for name, parameter in model.named_parameters():
        assert name.removesuffix(".weight") in masks or torch.equal(parameter, before[name])
    assert not torch.signbit(weight[0, :4]).any(), "a kept zero is +0.0"

    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == [2, 4]
    assert 0 < logged[0]["feasible_share"] < logged[1]["feasible_share"] <= 1
    assert 0 < logged[0]["norm_gap"] < logged[1]["norm_gap"] < 1
    assert 0 < logged[0]["mask_change"] < 1
    assert callback.figures == {key: logged[1][key] for key in callback.figures} | {"mask_change": 0.0}


def at_the_end(change):
    """A callback that calls change(model) after the last step, before the snap."""

    class Callback(ProxCallback):
        def on_train_end(self, args, state, control, model=None, **rest):
            change(model)
            super().on_train_end(args, state, control, model=model, **rest)

    return Callback()


def test_figures_are_those_of_the_weights(tmp_path):
    """On a sample of everything: the share by NMPattern, the gap of the kept weights."""
    model, seen = tiny_model("llama"), {}
    before = copy_weights(model)
    callback = at_the_end(lambda model: seen.update(copy_weights(model)))
    make(tmp_path, model, callback, reg_lambda=20.0).train()
    kept = torch.cat([mask.flatten() for mask in callback.masks.values()])
    w0 = torch.cat([before[f"{name}.weight"].flatten() for name in callback.masks])[kept]
    learned = [seen[f"{name}.weight"] for name in callback.masks]
    blocks = torch.cat([NMPattern(2, 4).feasible_blocks(weight).flatten() for weight in learned])
    learned = torch.cat([weight.flatten() for weight in learned])[kept]
    assert callback.figures["feasible_share"] == pytest.approx(blocks.float().mean().item())
    assert callback.figures["norm_gap"] == pytest.approx(((learned - w0).norm() / w0.norm()).item(), rel=1e-5)


def assert_snapped(model, before, masks):
    """Every pruned layer holds W0 under its mask."""
    for name, mask in masks.items():
        assert torch.equal(model.get_submodule(name).weight, torch.where(mask, before[f"{name}.weight"], 0))


def test_a_resumed_run_ends_as_an_undisturbed_one_and_a_second_training_returns_to_w0(tmp_path):
    """The checkpoint holds learned weights; W0 is still what the Trainer was given."""
    before = copy_weights(tiny_model("llama"))
    first, second = ProxCallback(), ProxCallback()
    make(tmp_path / "a", callback=first, reg_lambda_rel=0.5, save_strategy="steps", save_steps=2).train()
    resumed = make(tmp_path / "b", callback=second, reg_lambda_rel=0.5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert all(torch.equal(mask, second.masks[name]) for name, mask in first.masks.items())
    assert_snapped(resumed.model, before, second.masks)
    resumed.train()
    assert_snapped(resumed.model, before, second.masks)


# ------------------------------------------------------------------------------------------- held masks


def fine_tuner(folder, model, **settings):
    """A plain Trainer whose only callback holds the masks."""
    plain = lambda reg_lambda, **rest: transformers.Trainer(**rest)  # noqa: E731
    return make(folder, model, trainer_module.HoldMasksCallback(), plain, gradient_accumulation_steps=2, **settings)


def test_fine_tuning_holds_the_masks_and_resumes_bit_for_bit(tmp_path):
    start = pruned_model()
    layers = prunable_layers(start)
    with torch.no_grad():
        next(iter(layers.values())).weight[:, :4] = torch.tensor([0.0, 0.0, 0.0, 0.5])  # a zero is trained
    before = copy_weights(start)
    straight = fine_tuner(tmp_path / "a", copy.deepcopy(start), save_strategy="steps", save_steps=2)
    straight.train()
    resumed = fine_tuner(tmp_path / "b", copy.deepcopy(start))
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for (name, one), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert not torch.equal(one, before[name]), f"{name} learns"
    for name in layers:
        weight = straight.model.get_submodule(name).weight
        kept = nm_mask(before[f"{name}.weight"].abs())
        assert torch.equal(weight != 0, kept)
        assert not weight[~kept].signbit().any()
        assert not weight._post_accumulate_grad_hooks, "the hooks end with the training"
        for moment in ("exp_avg", "exp_avg_sq"):
            assert not straight.optimizer.state[weight][moment][~kept].any()


# ------------------------------------------------------------------------------------------- refusals


def frozen_model():
    model = tiny_model("llama").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


FROZEN = r"all 14 layers to prune are frozen .*LoRA.*train the layers themselves"
DENSE = "no parameter of this AdamW is 2:4: the model is dense; prune it first"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: make(folder, pattern="2:4"), "give one of the two"),
        (lambda folder: make(folder, reg_lambda=1.0, reg_lambda_rel=1.0), "give one of the two"),
        (lambda folder: make(folder, frozen_model()).create_optimizer(), FROZEN),
        (lambda folder: fine_tuner(folder, tiny_model("llama")).train(), DENSE),
    ],
)
def test_what_cannot_be_trained_is_refused(call, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_weights_that_are_not_finite_are_not_ranked(tmp_path):
    def spoil(model):
        model.model.layers[0].mlp.up_proj.weight.data[1, 2:4] = torch.nan

    with pytest.raises(ValueError, match=r"2 weights became NaN or infinite.*lower learning_rate"):
        make(tmp_path, callback=at_the_end(spoil)).train()
    assert not (tmp_path / "masks.safetensors").exists()


def test_resuming_without_the_mixin_is_refused(tmp_path):
    """Without it W0 is not copied before the checkpoint is loaded."""
    make(tmp_path / "a", save_strategy="steps", save_steps=2).train()

    class Plain(transformers.Trainer):
        def create_optimizer(self, model=None):
            weights = [layer.weight for layer in prunable_layers(self.model).values()]
            self.optimizer = ProxOptimizer(torch.optim.AdamW(weights), 0.25)
            return self.optimizer

    trainer = make(tmp_path / "b", kind=lambda reg_lambda, **rest: Plain(**rest))
    checkpoint = tmp_path / "a" / "checkpoint-2"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 2
    (checkpoint / "optimizer.pt").unlink()  # has other groups
    with pytest.raises(ValueError, match=r"resumed at step 2: .* pretrained .*ProxTrainerMixin"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("sign", ["FSDP1", "the accelerator's", "the parameters'", "before any work"])
def test_fsdp1_and_deepspeed_are_refused_with_the_reason(tmp_path, sign):
    class OnDeepSpeed(MaskTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.is_deepspeed_enabled = True

    words = r"DeepSpeed ZeRO .*splits N:M blocks.*FSDP2"
    if sign == "before any work":
        with pytest.raises(ValueError, match=words):
            make(tmp_path, kind=OnDeepSpeed)
        return
    trainer = make(tmp_path)
    if sign == "FSDP1":
        trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)  # as after fsdp_config={"version": 1}
        words = r"FSDP1 .*splits N:M blocks.*FSDP2: .*fsdp=True"
    elif sign == "the accelerator's":
        trainer.is_deepspeed_enabled = True
    else:
        trainer.model.lm_head.weight.ds_id = 7
    with pytest.raises(ValueError, match=words):
        trainer.create_optimizer()
    assert trainer.optimizer is None


# ------------------------------------------------------------------------------------------- examples/hf_trainer.py


@pytest.fixture(scope="module")
def example():
    path = pathlib.Path(__file__).resolve().parents[2] / "examples" / "hf_trainer.py"
    spec = importlib.util.spec_from_file_location("hf_trainer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_prunes_the_decoder_blocks_only(example, tmp_path, capsys):
    example.main(["--max_steps", "4", "--output_dir", str(tmp_path)])
    assert re.search(r"2:4 blocks before the snap: \d+\.\d%; 14 layers pruned", capsys.readouterr().out)
    masks = load_masks(tmp_path / "masks.safetensors")
    torch.manual_seed(0)
    before = dict(example.tiny_llama().named_parameters())  # the same weights the example started from
    after = example.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert masks.keys() == prunable_layers(after).keys()
    assert len(masks) == 2 * 7, "q, k, v, o, gate, up and down of two decoder blocks"
    assert_snapped(after, before, masks)
    for name, weight in after.named_parameters():
        assert name.removesuffix(".weight") in masks or torch.equal(weight, before[name])


def test_the_example_needs_text_for_a_model(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--model", "somewhere"])
    assert "--model and --text go together" in capsys.readouterr().err


class Autoencoder(torch.nn.Module):
    """A model that is not one of transformers: it has no `config`."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = torch.nn.Linear(16, 8), torch.nn.Linear(8, 16)

    def forward(self, x):
        return {"loss": (self.decode(self.encode(x)) - x).pow(2).mean()}


def test_a_model_without_config(tmp_path):
    data = [{"x": torch.randn(16)} for _ in range(32)]
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=3, report_to=[], use_cpu=True)
    more = {"train_dataset": data, "reg_lambda_rel": 0.2, "exclude": ["decode"], "callbacks": [ProxCallback()]}
    MaskTrainer(model := Autoencoder(), arguments, **more).train()
    assert load_masks(tmp_path / "masks.safetensors").keys() == {"encode"}
    for name, layer in model.named_children():
        assert bool((layer.weight == 0).float().mean() == 0.5) == (name == "encode")
    with pytest.raises(ValueError, match=r"include=\['none'\] and exclude=None select none of \['encode', 'decode'\]"):
        MaskTrainer(model, arguments, train_dataset=data, reg_lambda_rel=0.2, include=["none"]).train()
