"""The mixin and the callback in one process: pruned layers, figures, masks, resuming, refusals, and the example."""

import copy
import importlib.util
import pathlib
import re
from types import SimpleNamespace

import pytest
import torch
from pruned import pruned_model
from tiny_models import tiny_model

from proxsparse import NMPattern, ProxAdamW, ProxOptimizer, nm_mask
from proxsparse.io.mask_files import load_masks, read_masks, save_masks
from proxsparse.models.layers import prunable_layers
from proxsparse.models.snap import copy_weights

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
trainer_module = pytest.importorskip("proxsparse.integrations.transformers_trainer")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not on the cpp backend"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument"),
]


class MaskTrainer(trainer_module.ProxTrainerMixin, transformers.Trainer):
    pass


def make(folder, model=None, kind=MaskTrainer, ours=None, **settings):
    ids = torch.randint(260, (16, 12), generator=torch.Generator().manual_seed(1))
    arguments = {"max_steps": 4, "logging_steps": 2, "learning_rate": 1e-3, "save_strategy": "no"}
    return kind(
        model=tiny_model("llama") if model is None else model,
        args=transformers.TrainingArguments(
            folder, **arguments | settings, weight_decay=0.1, use_cpu=True, report_to="none", disable_tqdm=True
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        **ours or {"reg_lambda": 0.01},
    )


# ------------------------------------------------------------------------------------------- masks


def test_only_layers_of_decoder_blocks_are_pruned_and_groups_stay_as_trainer_made_them(tmp_path):
    model = tiny_model("llama")
    frozen = model.model.layers[0].mlp.down_proj.requires_grad_(False)
    trainer = make(tmp_path, model, ours={"pattern": "1:4", "reg_lambda": 0.25})
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, ProxOptimizer)
    assert trainer.create_optimizer() is optimizer, "a second call of train"
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    assert group_of.keys() == {p for p in model.parameters() if p.requires_grad}
    assert {layer.weight for layer in trainer.learned().values()} == {
        layer.weight for layer in prunable_layers(model).values() if layer is not frozen
    }
    assert all((group["pattern"], group["reg_lambda"]) == ("1:4", 0.25) for group in group_of.values())
    assert group_of[model.lm_head.weight]["weight_decay"] == 0.1
    assert group_of[model.model.norm.weight]["weight_decay"] == 0


def test_the_masks_and_the_logged_share_are_those_of_the_learned_weights(tmp_path):
    trainer = make(tmp_path, ours={"reg_lambda": 20.0})
    trainer.train()
    masks = load_masks(tmp_path / "masks.safetensors")
    assert masks.keys() == trainer.masks.keys() == prunable_layers(trainer.model).keys()
    weights = {name: trainer.model.get_submodule(name).weight for name in masks}
    for name, mask in masks.items():
        assert torch.equal(mask, nm_mask(weights[name].abs()))
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logged] == [2, 4]
    blocks = torch.cat([NMPattern(2, 4).feasible_blocks(weight).flatten() for weight in weights.values()])
    assert 0 < logged[0]["feasible_share"] < logged[1]["feasible_share"]
    assert logged[1]["feasible_share"] == pytest.approx(blocks.float().mean().item())


def test_an_optimizer_of_proxsparse_keeps_its_pattern(tmp_path):
    model = tiny_model("llama")
    own = ProxAdamW(model.parameters(), lr=1e-3, reg_lambda=1.0, pattern="6:8", model=model)
    trainer = make(tmp_path, model, ours={"reg_lambda": 1.0, "optimizers": (own, None)})
    trainer.train()
    _, patterns, _ = read_masks(tmp_path / "masks.safetensors")
    assert {str(pattern) for pattern in patterns.values()} == {"6:8"}


class LambdaZero(transformers.TrainerCallback):
    """Sets reg_lambda to 0 in the first param groups, or in all, until the training ends."""

    def __init__(self, groups=None):
        self.groups = groups

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        for group in optimizer.param_groups[: self.groups]:
            group["reg_lambda"] = 0.0


@pytest.mark.parametrize("groups", [1, None])
def test_a_lambda_that_becomes_zero_leaves_no_layer_out(tmp_path, groups):
    model = tiny_model("llama")
    blocks = [{"params": list(block.parameters())} for block in model.model.layers]
    dense = {"params": list(model.lm_head.parameters()), "reg_lambda": 0}
    own = ProxAdamW([*blocks, dense], lr=1e-3, reg_lambda=1.0)
    trainer = make(
        tmp_path, model, ours={"reg_lambda": 1, "optimizers": (own, None), "callbacks": [LambdaZero(groups)]}
    )
    trainer.train()
    assert trainer.masks.keys() == prunable_layers(model).keys()
    assert all("feasible_share" in row for row in trainer.state.log_history if "loss" in row)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    first = make(tmp_path / "a", save_strategy="steps", save_steps=2)
    first.train()
    resumed = make(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert all(torch.equal(mask, resumed.masks[name]) for name, mask in first.masks.items())
    for one, other in zip(first.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------- held masks


def fine_tuner(folder, model, **settings):
    """A plain Trainer whose only callback holds the masks."""
    ours = {"callbacks": [trainer_module.HoldMasksCallback()]}
    return make(folder, model, transformers.Trainer, ours, gradient_accumulation_steps=2, **settings)


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


class OnDeepSpeed(MaskTrainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.is_deepspeed_enabled = True


class OnFSDP1(MaskTrainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)  # as after fsdp_config={"version": 1}


class Diverging(MaskTrainer):
    def training_step(self, model, *rest):
        loss = super().training_step(model, *rest)
        if self.state.global_step == 3:
            model.model.layers[0].mlp.up_proj.weight.data[1, 2:4] = torch.nan
        return loss


def frozen_model():
    model = tiny_model("llama").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


def with_experts():
    """A model without config."""
    model = torch.nn.Linear(8, 8)
    model.experts = torch.nn.Parameter(torch.randn(3, 8, 8))
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: make(folder, frozen_model()).create_optimizer(), "there is nothing to prune"),
        (lambda folder: fine_tuner(folder, tiny_model("llama")).train(), "no parameter of this AdamW is pruned"),
        (lambda folder: make(folder, with_experts()).create_optimizer(), r"shape \[3, 8, 8\]: only masks of matrices"),
        (lambda folder: make(folder, ours={"reg_lambda": 0}).create_optimizer(), "reg_lambda=0 .*no layer is pruned"),
        (lambda folder: make(folder, kind=OnDeepSpeed), r"DeepSpeed ZeRO .*splits N:M blocks.*FSDP2"),
        (lambda folder: make(folder, kind=OnFSDP1), r"FSDP1 .*splits N:M blocks.*FSDP2: .*fsdp=True"),
        (lambda folder: make(folder, kind=Diverging).train(), r"weights became NaN or infinite.*lower learning_rate"),
    ],
)
def test_what_cannot_be_trained_is_refused(call, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)
    assert not (tmp_path / "masks.safetensors").exists()


def test_only_masks_are_replaced(tmp_path):
    (tmp_path / "masks.safetensors").write_text("the user's")
    with pytest.raises(ValueError, match=r"masks\.safetensors is not a mask file, and the masks would replace it"):
        make(tmp_path).train()
    assert (tmp_path / "masks.safetensors").read_text() == "the user's"
    save_masks(tmp_path / "masks.safetensors", {"layer": torch.tensor([[True, True, False, False]])}, "2:4", "model")
    make(tmp_path, max_steps=1).train()
    assert "layer" not in load_masks(tmp_path / "masks.safetensors")


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
    assert re.search(r"2:4 blocks: \d+\.\d%; 14 layers have masks", capsys.readouterr().out)
    masks = load_masks(tmp_path / "masks.safetensors")
    torch.manual_seed(0)
    before = dict(example.tiny_llama().named_parameters())  # the same weights the example started from
    after = example.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert masks.keys() == prunable_layers(after).keys()
    assert len(masks) == 2 * 7, "q, k, v, o, gate, up and down of two decoder blocks"
    for name, weight in after.named_parameters():
        mask = masks.get(name.removesuffix(".weight"), torch.ones_like(weight, dtype=torch.bool))
        assert torch.equal(weight, torch.where(mask, before[name], 0))


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
    model = Autoencoder()
    model.decode.requires_grad_(False)
    MaskTrainer(model, arguments, train_dataset=data, reg_lambda=0.2).train()
    assert load_masks(tmp_path / "masks.safetensors").keys() == {"encode"}
